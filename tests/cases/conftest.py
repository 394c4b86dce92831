"""One tiny model with random weights, a chip that captures graphs, and a loop that serves requests of any mixture."""

import attrs
import pytest
import tiny

import afl
from afl import chip as chips
from afl import plugins
from afl.chip import Limits
from afl.run.sampling import SamplingParams

SETTINGS = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=61,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


@pytest.fixture(scope="session")
def model():
    return afl.random_model("LlamaForCausalLM", SETTINGS, seed=3)


@pytest.fixture(scope="session")
def settings():
    return SETTINGS


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """A checkpoint folder with tokenizer and chat template."""
    return tiny.folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def text_model(llama):
    return afl.load(llama)


@pytest.fixture(scope="module")
def capturing():
    """The host processor with buckets and padding, as a chip that captures graphs has them."""
    chip = attrs.evolve(plugins.chip("cpu"), name="cpu_captures", limits=Limits(block_tokens=(16, ()), graph_streams=8))
    yield chips.register(chip)
    chips._CHIPS.pop("cpu_captures")


@pytest.fixture
def serve():
    """serve(engine, {id: (prompt, sampling)}) -> {id: (tokens, finish)}; `plans` receives every plan."""

    def run(engine, requests, plans=None):
        for id, (prompt, sampling) in requests.items():
            engine.submit(prompt, SamplingParams(**sampling), id)
        tokens, finish = {id: [] for id in requests}, {}
        while engine.busy:
            before = engine.steps
            outputs = engine.step().outputs
            if plans is not None and engine.steps > before:
                plans.append(engine.flight[-1].plan)
            for id, token, why in outputs.rows():
                tokens.setdefault(id, []).extend([token] * (token >= 0))
                if why:
                    finish[id] = why
            finish |= dict(outputs.refused)
        return {id: (tokens[id], finish[id]) for id in requests}

    return run


@pytest.fixture
def cli():
    """cli(*arguments) -> the result of `afl ...` in this process."""
    from afl_cli.commands import app
    from typer.testing import CliRunner

    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments], prog_name="afl")
