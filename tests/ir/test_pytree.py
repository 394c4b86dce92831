"""Struct classes are torch pytrees, once torch is in use."""

import subprocess
import sys

import torch
from torch.utils import _pytree

from afl import tree
from afl.ir.pytree import register_pytrees


@tree.struct
class Early:
    a: object
    b: object
    kind: str = tree.static("k")


def test_structs_made_before_and_after_registration_are_pytrees():
    register_pytrees()
    register_pytrees()

    @tree.struct
    class Late:
        inner: Early

    t = Late(Early(torch.ones(1), (torch.ones(2), None), "z"))
    leaves, spec = _pytree.tree_flatten(t)
    assert len(leaves) == 3 and leaves[2] is None              # to torch None is a leaf, to afl.tree an empty tree
    back = _pytree.tree_unflatten([x if x is None else x + 1 for x in leaves], spec)
    assert isinstance(back, Late) and back.inner.kind == "z" and back.inner.b[0].tolist() == [2.0, 2.0]
    paths = [_pytree.keystr(p) for p, _ in _pytree.tree_flatten_with_path(t)[0]]
    assert paths[0] == ".inner.a"


def test_vmap_walks_structs():
    register_pytrees()
    out = torch.vmap(lambda t: t.a + t.b)(Early(torch.ones(3, 2), torch.ones(3, 2)))
    assert out.shape == (3, 2)


def test_trees_alone_do_not_import_torch():
    code = "import sys, afl.tree; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
