"""Perplexity against transformers' own losses; distances against their formulas; the command."""

import json
import math

import attrs
import numpy as np
import pytest
import tiny
import torch
from afl_cli.commands import app
from typer.testing import CliRunner

import afl
from afl import tree
from afl.errors import BadInput
from afl.run.ppl import Reader, layer_errors, score, windows

CASES = [(300, 256, 128), (300, 64, 32), (300, 50, 7), (40, 64, 1), (2, 2, 1), (257, 200, 199)]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    return str(tiny.folder(tmp_path_factory.mktemp(request.param), request.param, initializer_range=0.2))


def tokens(n, v=250):
    return torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(n)).tolist()


def theirs(folder, ids, context, stride):
    """Strided perplexity by the labels and the loss of transformers."""
    import transformers

    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = n = done = 0
    for start in range(0, len(ids), stride):
        end = min(start + context, len(ids))
        x = torch.tensor([ids[start:end]])
        labels = x.clone()
        labels[:, : x.shape[1] - (end - done)] = -100
        count = int((labels[:, 1:] != -100).sum())
        if count:
            with torch.inference_mode():
                total += float(peer(x, labels=labels).loss) * count
        n, done = n + count, end
        if end == len(ids):
            break
    return n, math.exp(total / n)


@pytest.mark.parametrize(("n", "context", "stride"), CASES)
def test_perplexity_is_that_of_transformers(folder, n, context, stride):
    ids = tokens(n)
    got = score(afl.load(folder, dtype="float32"), ids, context, stride)
    count, want = theirs(folder, ids, context, stride)
    assert got.tokens == count and got.ppl == pytest.approx(want, rel=1e-4)


def test_every_token_but_the_first_is_scored_once():
    for n in range(2, 40):
        for context in range(2, 12):
            for stride in range(1, context):
                found = [i for w in windows(n, context, stride) for i in range(w.first, w.end)]
                assert found == list(range(1, n))
                assert all(w.start < w.first and w.end - w.start <= context for w in windows(n, context, stride))


def test_a_precision_is_no_distance_from_itself(folder):
    m = afl.load(folder, dtype="float32")
    got = score(m, tokens(200), 64, 32, m)
    assert got.ppl == got.other_ppl and got.kl == 0.0 and got.top1 == 1.0
    assert all(e == 0.0 for _, e in layer_errors(m, m, tokens(200), 64))


def test_the_divergence_is_from_the_other_precision_to_this_one(folder):
    import transformers

    a, b = afl.load(folder, dtype="float32", weights="int4"), afl.load(folder, dtype="float32")
    ids = tokens(60)
    got = score(a, ids, 64, 32, b)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        other = peer(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    own = Reader(a, 64).logits(np.array(ids[:-1]), 0).log_softmax(-1)
    kl = (other.exp() * (other - own)).sum(-1).mean()
    back = (own.exp() * (own - other)).sum(-1).mean()
    assert got.kl == pytest.approx(float(kl), rel=1e-4) and abs(float(back) - float(kl)) > 1e-3 * float(kl)
    assert got.top1 == pytest.approx(float((other.argmax(-1) == own.argmax(-1)).float().mean()))


def test_layer_errors_are_those_of_the_hidden_states(folder):
    """Behind each layer: the hidden states of transformers for weights scaled by a known amount in one matrix."""
    import transformers

    m = afl.load(folder, dtype="float32")
    down = m.params.layers[0].down
    changed = tree.evolve(m.params.layers[0], down=tree.evolve(down, w=_scaled(down.w, 1.1)))
    other = attrs.evolve(m, params=tree.evolve(m.params, layers=(changed, *m.params.layers[1:])))
    ids = tokens(50)
    got = dict(layer_errors(other, m, ids, 64))
    assert list(got) == [f"layer {i} {x}" for i in (0, 1) for x in ("attention", "mlp")]
    states = []
    for scale in (1.0, 1.1):
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            peer.model.layers[0].mlp.down_proj.weight.mul_(scale)
            states.append(peer(torch.tensor([ids]), output_hidden_states=True).hidden_states[1])
    want = float((states[1] - states[0]).norm() / states[0].norm())
    assert got["layer 0 attention"] == 0.0 and got["layer 0 mlp"] == pytest.approx(want, rel=1e-3)
    assert got["layer 1 mlp"] > 0


def _scaled(w, by):
    from afl.layout import copy

    made = copy(w)
    torch.as_strided(made, (made.untyped_storage().nbytes() // 4,), (1,), 0).mul_(by)
    return made


@pytest.mark.parametrize(("ids", "context", "stride", "said"), [
    ([1], 8, 4, "at least 2"), ([1, 2, 3], 1, 1, "context is 1"), ([1, 2, 3], 999, 4, "context is 999"),
    ([1, 2, 3], 8, 8, "stride is 8"), ([1, 2, 3], 8, 0, "stride is 0"),
])
def test_what_does_not_hold_is_refused(ids, context, stride, said, folder):
    with pytest.raises(BadInput, match=said):
        score(afl.load(folder), ids, context, stride)


def test_the_command(folder, tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("the cat sat on the mat, naïve café. " * 20)

    def run(*a):
        return CliRunner().invoke(app, ["eval", "ppl", "--model", folder, "--text", str(file), *a])

    done = run("--json", "--context", "64", "--weights", "int8", "--compare", "float32", "--layers")
    assert done.exit_code == 0, done.stderr
    r = json.loads(done.stdout)
    ids = tiny.tokenizer().encode(file.read_text()).ids
    assert r["tokens"] == len(ids) - 1 and r["other_ppl"] == pytest.approx(theirs(folder, ids, 64, 32)[1], rel=1e-4)
    assert 0 < r["kl"] < 1 and len(r["layers"]) == 4 and all(x["relative_error"] > 0 for x in r["layers"])
    assert "perplexity" in run("--tokens", "30").stdout
    for bad, said in ((("--layers",), "--compare"), (("--context", "9999"), "context is 9999"),
                      (("--compare", "int9"), "int9"), (("--tokens", "1"), "at least 2")):
        done = run(*bad)
        assert done.exit_code == 2 and said in done.stderr and "Traceback" not in done.stderr
    missing = CliRunner().invoke(app, ["eval", "ppl", "--model", folder, "--text", str(tmp_path / "no.txt")])
    assert missing.exit_code == 2 and "cannot read" in missing.stderr
