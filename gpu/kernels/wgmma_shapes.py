#!/usr/bin/env python3
"""Writes wgmma_shapes.inc: one wrapper for each accumulator width that the kernels use.

PTX wants every accumulator register spelled out as an operand of its own, so the text is written by this script:
    python3 gpu/kernels/wgmma_shapes.py > gpu/kernels/wgmma_shapes.inc
"""

WIDTHS = (64, 80, 128, 176, 192)


def lines(items, width=8):
    return [", ".join(items[i : i + width]) for i in range(0, len(items), width)]


def wrapper(n):
    count = n // 2
    registers = lines([f"%{i}" for i in range(count)])
    name = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16"

    def body(operands, inputs, accumulate):
        outputs = lines([f'"{"+f" if accumulate else "=f"}"(d[{i}])' for i in range(count)], 6)
        out = ["    asm volatile("]
        out.append('        "{\\n.reg .pred accumulate;\\n"')
        out.append(f'        "setp.ne.b32 accumulate, {1 if accumulate else 0}, 0;\\n"')
        out.append(f'        "{name} {{"')
        for i, line in enumerate(registers):
            out.append(f'        "{line}{", " if i + 1 < len(registers) else ""}"')
        out.append(f'        "}}, {operands};\\n}}\\n"')
        for i, line in enumerate(outputs):
            out.append(f'        {": " if i == 0 else "  "}{line}{"," if i + 1 < len(outputs) else ""}')
        out.append(f"        : {inputs});")
        return out

    c = count
    text = ["template <>", f"struct Wgmma<{n}> {{"]
    # Zero starts have outputs only: with the old contents as an input the compiler would keep them alive.
    for accumulate in (False, True):
        start = "add" if accumulate else "start"
        text.append("  template <int kTransA, int kTransB>")
        text.append(
            f"  __device__ __forceinline__ static void {start}(float (&d)[{count}], std::uint64_t a, "
            "std::uint64_t b) {"
        )
        text += body(
            f"%{c}, %{c + 1}, accumulate, 1, 1, %{c + 2}, %{c + 3}",
            '"l"(a), "l"(b), "n"(kTransA), "n"(kTransB)',
            accumulate,
        )
        text.append("  }")
    text.append("  template <int kTransB>")
    text.append(
        f"  __device__ __forceinline__ static void add(float (&d)[{count}], "
        "const std::uint32_t* a, std::uint64_t b) {"
    )
    text += body(
        f"{{%{c}, %{c + 1}, %{c + 2}, %{c + 3}}}, %{c + 4}, accumulate, 1, 1, %{c + 5}",
        '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransB)',
        True,
    )
    text.append("  }")
    text.append("};")
    return "\n".join(text)


print("// Written by wgmma_shapes.py. Do not edit.")
print("// clang-format off")
for width in WIDTHS:
    print()
    print(wrapper(width))
print("\n// clang-format on")
