#!/usr/bin/env python3
"""Writes wgmma_shapes.inc: the register lists of wgmma's 32 widths, which PTX wants spelled out.

    python3 gpu/probe/wgmma_shapes.py > gpu/probe/wgmma_shapes.inc
"""

print("// Written by wgmma_shapes.py. BITATTN_WGMMA_SHAPE(N, register list, accumulators, next five operands)")
for n in range(8, 257, 8):
    count = n // 2

    def lines(items, width):
        return [", ".join(items[i : i + width]) for i in range(0, len(items), width)]

    registers = lines([f"%{i}" for i in range(count)], 16)
    accumulators = lines([f'"+f"(d[{i}])' for i in range(count)], 8)
    print(f"BITATTN_WGMMA_SHAPE({n},")
    for i, line in enumerate(registers):
        print(f'  "{line}{", " if i + 1 < len(registers) else ""}"')
    print("  ,")
    for i, line in enumerate(accumulators):
        opening = "(" if i == 0 else " "
        closing = ")" if i + 1 == len(accumulators) else ","
        print(f"  {opening}{line}{closing}")
    print("  , " + ", ".join(f'"%{count + i}"' for i in range(8)) + ")")
