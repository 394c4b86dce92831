"""The vendor's storage formats on CPU."""

from afl.layout import layout, plain
from afl.ops.emu.register import emulate, require

ND, NZ = 2, 29                          # the vendor's numbers


@emulate("npu::npu_format_cast")
def _format_cast(input, acl_format, *, customize_dtype=None, input_dtype=None):
    """A copy of `input` whose memory lies in another format; the shape stays logical.

    On chips other than 310P and 950 the vendor keeps ND unless torch.npu.config.allow_internal_format is set.
    """
    require(acl_format in (ND, NZ), f"acl_format must be {ND} (ND) or {NZ} (NZ)", acl_format)
    require(customize_dtype is None and input_dtype is None, "casts of packed types are not emulated")
    made = plain(input)
    return layout("nz").to(made) if acl_format == NZ else made.clone() if made is input else made
