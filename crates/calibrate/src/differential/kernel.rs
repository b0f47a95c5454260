//! A kernel in which each warp loads the registers of one fragment, multiplies, and stores the result.

use emu::numerics::tensor::{self, Accumulator, BitProduct, Distribution, Input, MmaKind, TensorRules};
use ptx::{
    Access, Arg, BitOp, BufferSpec, Builder, Dim3, Kernel, Launch, Mma, MmaShape, Module, Op, Operand,
    Pointer, R32, R64, SpecialReg, Target, Type, Value, Verified,
};

use super::{Operands, Subject, WARPS_PER_CTA};

/// The module and the instruction that it executes.
pub(super) fn module(kind: MmaKind, target: Target) -> (Module, String) {
    let op = operation(kind);
    let module = match kind.accumulator() {
        Accumulator::F64 => build::<R64>(kind, op, target, 8),
        Accumulator::F16 | Accumulator::F32 | Accumulator::S32 { .. } => build::<R32>(kind, op, target, 4),
    };
    (module, op.to_string())
}

pub(super) fn register_bytes(kind: MmaKind) -> usize {
    if kind.accumulator() == Accumulator::F64 { 8 } else { 4 }
}

/// Bytes of A, B, C and D, ordered by register and lane.
pub(super) fn bytes(kind: MmaKind) -> [usize; 4] {
    let [a, b, c] = kind.registers();
    [a, b, c, c].map(|registers| registers * 32 * register_bytes(kind))
}

/// Random registers and the emulator's result for them.
pub(super) fn draw(
    kind: MmaKind,
    rules: TensorRules,
    distribution: Distribution,
    seed: u64,
) -> Result<Operands, tensor::MmaError> {
    if kind.accumulator() == Accumulator::F64 {
        let f = tensor::random_fragment_f64(kind, distribution, seed);
        let mut d = f.c.clone();
        tensor::mma_f64(kind, rules, &f.a, &f.b, &f.c, &mut d)?;
        return Ok([&f.a, &f.b, &f.c, &d].map(|lanes| in_memory(lanes.as_flattened(), u64::to_le_bytes)));
    }
    let f = tensor::random_fragment(kind, distribution, seed);
    let mut d = f.c.clone();
    tensor::mma(kind, rules, &f.a, &f.b, &f.c, &mut d)?;
    Ok([&f.a, &f.b, &f.c, &d].map(|lanes| in_memory(lanes.as_flattened(), u32::to_le_bytes)))
}

pub(super) fn in_memory<W: Copy, const N: usize>(words: &[W], bytes: fn(W) -> [u8; N]) -> Vec<u8> {
    words.iter().flat_map(|word| bytes(*word)).collect()
}

/// The launch of a subject's module over `cases`.
pub(super) fn launch(subject: Subject, module: Verified, cases: u64) -> Kernel {
    let bytes = subject.bytes();
    let buffer = |i: usize, access| BufferSpec {
        name: ["a", "b", "c", "d"][i].to_owned(),
        bytes: cases as usize * bytes[i],
        access,
    };
    Kernel {
        module,
        entry: ENTRY.to_owned(),
        launch: Launch {
            dynamic_shared: subject.shared(),
            ..Launch::new(
                Dim3((cases / subject.cases_per_cta()) as u32, 1, 1),
                Dim3(WARPS_PER_CTA as u32 * 32, 1, 1),
            )
        },
        buffers: vec![
            buffer(0, Access::Read),
            buffer(1, Access::Read),
            buffer(2, Access::Read),
            buffer(3, Access::Write),
        ],
        tensor_maps: Vec::new(),
        args: (0..4).map(|index| Arg::Buffer { index, offset: 0 }).collect(),
    }
}

/// Name of every entry.
pub(super) const ENTRY: &str = "mma";

fn build<V: Value>(kind: MmaKind, op: Op, target: Target, width: u32) -> Module {
    let mut k = Builder::kernel(ENTRY);
    // fp8 with 16-bit accumulators, and with m16n8k16, need PTX 8.7.
    if matches!(kind.a(), Input::E4m3 | Input::E5m2) {
        k.require(8, 7);
    }
    if kind.accumulator() == Accumulator::F64 && kind.shape().m == 16 {
        k.require(7, 8);
    }
    if kind.a().bits() == 1 {
        k.require(7, 1);
    }
    let [a, b, c] = kind.registers();
    let pointers = ["a", "b", "c", "d"].map(|name| k.param_pointer(name));
    let (cta, thread) = (k.special(SpecialReg::CtaidX), k.special(SpecialReg::TidX));
    let warp_in_cta = k.shr_u(thread, 5);
    let lane = k.and(thread, 31);
    let warp = k.mad(cta, WARPS_PER_CTA as u32, warp_in_cta);
    let place = |k: &mut Builder, operand: usize, registers: usize| {
        let first = k.mad(warp, 32 * registers as u32, lane);
        k.index(pointers[operand], first, width)
    };
    let load = |k: &mut Builder, operand: usize, registers: usize| {
        let from = place(k, operand, registers);
        let fragment = (0..registers).map(|r| k.ld::<V>(from.at(r as i64 * 32 * i64::from(width)))).collect();
        registers_of(fragment)
    };
    let (fa, fb, fc) = (load(&mut k, 0, a), load(&mut k, 1, b), load(&mut k, 2, c));
    let d: Vec<V> = (0..c).map(|_| k.reg()).collect();
    k.op(op, [registers_of(d.clone()), fa, fb, fc]);
    let to = place(&mut k, 3, c);
    for (r, value) in d.into_iter().enumerate() {
        k.st(to.at(r as i64 * 32 * i64::from(width)), value);
    }
    k.into_module(target)
}

/// Registers as a vector operand.
pub(super) fn registers_of<V: Value>(values: Vec<V>) -> Operand {
    Operand::Vector(values.into_iter().map(|v| Operand::Reg(v.reg())).collect())
}

fn operation(kind: MmaKind) -> Op {
    let shape = kind.shape();
    let shape = MmaShape { m: shape.m as u16, n: shape.n as u16, k: shape.k as u16 };
    let sum = match kind.accumulator() {
        Accumulator::F16 => Type::F16,
        Accumulator::F32 => Type::F32,
        Accumulator::F64 => Type::F64,
        Accumulator::S32 { .. } => Type::S32,
    };
    let mut mma = Mma::new(shape, sum, input(kind.a()), input(kind.b()), sum);
    mma.bits = match kind.a() {
        Input::Bits(BitProduct::Xor) => Some(BitOp::Xor),
        Input::Bits(BitProduct::And) => Some(BitOp::And),
        _ => None,
    };
    mma.satfinite = kind.accumulator() == Accumulator::S32 { saturate: true };
    Op::Mma(mma)
}

pub(super) const fn input(input: Input) -> Type {
    match input {
        Input::F16 => Type::F16,
        Input::Bf16 => Type::Bf16,
        Input::Tf32 => Type::Tf32,
        Input::E4m3 => Type::E4m3,
        Input::E5m2 => Type::E5m2,
        Input::S8 => Type::S8,
        Input::U8 => Type::U8,
        Input::F64 => Type::F64,
        Input::Bits(_) => Type::B1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_an_instruction_of_its_registers() {
        for kind in MmaKind::all() {
            let (module, text) = module(kind, Target::sm(90));
            let op = operation(kind);
            let Op::Mma(mma) = op else { panic!("{op}") };
            assert_eq!(text, op.to_string());
            let [a, b, c] = kind.registers();
            assert_eq!(mma.registers(), [a, b, c, c], "{op}");
            assert!(module.to_string().contains(&op.to_string()));
        }
    }
}
