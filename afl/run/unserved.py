"""Ops of a model's step that no kernel of its chip takes: known from types, before a weight is read."""

from typing import Any

from afl.ir.kernel import Choice, explain
from afl.ir.passes import cse, dce, drop_unit_collectives, usable
from afl.ir.rewrite import rewrite
from afl.ir.trace import trace
from afl.ops.fusions import RULES
from afl.run.ask import Ask
from afl.run.memory import tokens_of_block
from afl.run.rules import refuse
from afl.run.shards import layers_are_alike, with_layers


def refuse_unserved(model: Any) -> None:
    """Raise ConfigError if an op of the model's step has no kernel on its chip; before weights are read, if one can."""
    refuse(Ask(model.config, model.chip, unserved=unserved(model)))


def unserved(model: Any) -> tuple[str, ...]:
    """A sentence for each op without a kernel, in steps of one token and of the most that there can be.

    model: a Model, types for parameters will do.  Two layers stand for all where layers are alike.
    """
    if model.config.references:
        return ()
    specs, c = model.definition.params(model.c), model.config
    if model.c.layers > 2 and layers_are_alike(specs, model.caches):
        model = model.resized(with_layers(model.c, 2))
    found: dict[str, str] = {}
    size = tokens_of_block(model.caches, model.chip, c.block_tokens)
    for tokens, rows in ((1, 1), (c.max_step_tokens, c.max_seqs)):
        args = model.params, model.state_types(4, size, rows), model.batch_types(tokens, rows)
        g = drop_unit_collectives(trace(model.step, *args, tags=("param", "state", "batch")).graph, {})
        for e in dce(cse(rewrite(g, usable(RULES, model.chip), model.chip))).eqns:
            if e.op.name not in found:
                choice = explain(e.op, tuple(v and v.type for v in e.ins), e.params, model.chip)
                if choice.chosen is None:
                    found[e.op.name] = sentence(choice)
    return tuple(found.values())


def sentence(c: Choice) -> str:
    """Why an op has no kernel, in one line: the kernels whose features the chip has come with their reasons."""
    close = [f"{name} takes {why.rpartition('false: ')[2]}" if "false: " in why else f"{name}: {why}"
             for name, why in c.rejected if not why.startswith("needs ") and name != "reference"]
    types = " ".join(str(t) for t in c.types if t is not None)
    return f"{c.op} has no kernel on chip {c.chip!r} for {types}; " + ("; ".join(close) or "no kernel is made for it")
