"""Shapes as HLO writes them."""

from fedpax.hlo.parsing import arrays, dimensions, main_memory_bytes, shape_bytes


def test_shapes_of_hlo_are_read():
    assert arrays("(f32[64,512]{1,0}, s32[])") == ["f32[64,512]{1,0}", "s32[]"]
    assert dimensions("f32[64,512]{1,0}") == [64, 512]
    assert shape_bytes("(bf16[64,512]{1,0}, s4[8], token[])") == 2 * 64 * 512 + 4
    assert main_memory_bytes("(f32[8]{0}, f32[8]{0:S(1)})") == 32
