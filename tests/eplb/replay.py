"""Carrying out rounds on memory that holds names of experts; independent of the code that checks plans."""

from collections import Counter

from afl.dist.eplb.values import Placement


def replay(old, done, experts, staging, see=lambda layers, placement: None):
    """Carry out rounds on labelled memory: slots and staging of every rank hold names, reads see what is there then."""
    size = old.slots_per_rank
    slots = old.phys_to_log.copy()
    staged = {}                                             # (layer, rank, slot) -> expert
    for r, layers in zip(done.rounds, done.commits, strict=True):
        assert max(Counter(t.src_rank for t in r).values()) == 1, "a rank sends twice"
        assert max(Counter(t.dst_rank for t in r).values()) == 1, "a rank receives twice"
        for t in r:
            assert t.src_rank != t.dst_rank
            assert slots[t.layer, t.src_rank * size + t.src_slot] == t.expert, "the source holds something else"
            assert (t.layer, t.dst_rank, t.dst_slot) not in staged
            staged[t.layer, t.dst_rank, t.dst_slot] = t.expert
        if staging:
            assert max(Counter(rank for _, rank, _ in staged).values()) <= staging, "more staged than there is room"
        for key in [k for k in staged if k[0] in layers]:
            slots[key[0], key[1] * size + key[2]] = staged.pop(key)
        if layers:
            now = Placement(slots, old.ranks)
            assert now.check(experts) == []
            see(layers, now)
    assert not staged, "an expert is staged for ever"
    return Placement(slots, old.ranks)
