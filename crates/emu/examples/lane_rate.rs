//! Prints the time of one warp-wide arithmetic instruction (32 lanes) on one core.

use std::hint::black_box;
use std::time::Instant;

use flashcore_emu::numerics::approx::{Function, PackedFunction, f32_function, packed_function};
use flashcore_emu::numerics::float::lanes::{F32Op, Packed, PackedOp, f32_op, pack, packed_op};

fn main() {
    let a = std::array::from_fn(|lane| (0.37 * lane as f32 - 5.0).to_bits());
    let b = std::array::from_fn(|lane| (0.11 * lane as f32 + 1.0).to_bits());
    let mut d = [0; 32];
    for op in [F32Op::Add, F32Op::Mul, F32Op::Fma, F32Op::Max] {
        report(&format!("{op:?}.ftz.f32"), || f32_op(op, true, !0, &mut d, black_box([&a, &b, &a])));
    }
    for op in [PackedOp::Fma, PackedOp::Max] {
        report(&format!("{op:?}.f16x2"), || {
            packed_op(Packed::F16x2, op, !0, &mut d, black_box([&a, &b, &a]))
        });
    }
    for format in [Packed::F16x2, Packed::Bf16x2] {
        report(&format!("cvt.rn.{format:?}.f32"), || pack(format, !0, &mut d, black_box([&a, &b])));
    }
    for function in Function::ALL {
        report(&format!("{function:?}.approx.ftz.f32"), || {
            f32_function(function, true, !0, &mut d, black_box(&a))
        });
    }
    report("Ex2.approx.f16x2", || {
        packed_function(PackedFunction::Ex2, Packed::F16x2, !0, &mut d, black_box(&a))
    });
}

/// Prints the shortest time of several rounds.
fn report(name: &str, mut instruction: impl FnMut()) {
    const REPEATS: u32 = 20_000;
    let round = |_| {
        let start = Instant::now();
        for _ in 0..REPEATS {
            instruction();
        }
        start.elapsed().as_secs_f64() * 1e9 / f64::from(REPEATS)
    };
    println!("{name:<24} {:>7.1} ns", (0..7).map(round).fold(f64::INFINITY, f64::min));
}
