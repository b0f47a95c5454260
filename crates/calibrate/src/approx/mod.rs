//! Compares the `.approx` functions of a machine with the emulator's, on arbitrary inputs.

mod compare;

use emu::numerics::Lanes32;
use emu::numerics::approx::{
    ApproxOp, DivApprox, Function, PackedFunction, div_f32, error_bound, f32_function, is_exact,
    packed_function,
};
use emu::numerics::float::lanes::Packed;
use ptx::{
    Access, Arg, BinaryOp, BufferSpec, Builder, CmpOp, Dim3, F32, FloatMods, Kernel, Launch, Machine, Op,
    Operand, Precision, R32, SpecialReg, Target, Type, UnaryOp, Value, Violations,
};
use rayon::prelude::*;

pub use compare::{Agreement, Mismatch, ulps};

/// Why an instruction gave no results.
#[derive(Debug, thiserror::Error)]
pub enum ApproxError<E: std::error::Error> {
    /// The machine failed.
    #[error(transparent)]
    Machine(E),
    /// The verifier rejects the kernel around the instruction, which is a fault of this program.
    #[error("the kernel breaks the rules of PTX: {0}")]
    Generator(#[from] Violations),
}

/// An instruction for which PTX specifies an error bound but no bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Subject {
    F32 {
        function: Function,
        ftz: bool,
    },
    /// On two packed 16-bit floats.
    Half {
        function: PackedFunction,
        format: Packed,
    },
    /// `div.approx{.ftz}.f32` or `div.full{.ftz}.f32` of an input and its neighbour (the index with its last
    /// bit flipped).
    Div {
        division: DivApprox,
        ftz: bool,
    },
}

const THREADS: u32 = 256;

impl Subject {
    /// All subjects that exist on an architecture.
    pub fn all(sm: u32) -> Vec<Subject> {
        let mut all = Vec::new();
        for function in Function::ALL {
            all.push(Subject::F32 { function, ftz: false });
            if function != Function::Tanh {
                all.push(Subject::F32 { function, ftz: true });
            }
        }
        for function in [PackedFunction::Ex2, PackedFunction::Tanh] {
            all.push(Subject::Half { function, format: Packed::F16x2 });
            if sm >= 90 {
                all.push(Subject::Half { function, format: Packed::Bf16x2 });
            }
        }
        for division in [DivApprox::Approx, DivApprox::Full] {
            all.extend([false, true].map(|ftz| Subject::Div { division, ftz }));
        }
        all
    }

    fn op(self) -> Op {
        let approx = |ftz| FloatMods { precision: Precision::Approx, ftz, ..FloatMods::NONE };
        match self {
            Subject::F32 { function, ftz } => Op::Unary(unary(function), Type::F32, approx(ftz)),
            Subject::Half { function, format } => {
                let (op, ex2) = match function {
                    PackedFunction::Ex2 => (UnaryOp::Ex2, true),
                    PackedFunction::Tanh => (UnaryOp::Tanh, false),
                };
                match format {
                    Packed::F16x2 => Op::Unary(op, Type::F16x2, approx(false)),
                    // ex2 of bf16 exists only with `.ftz`.
                    Packed::Bf16x2 => Op::Unary(op, Type::Bf16x2, approx(ex2)),
                }
            }
            Subject::Div { division, ftz } => {
                let precision = match division {
                    DivApprox::Approx => Precision::Approx,
                    DivApprox::Full => Precision::Full,
                };
                Op::Binary(BinaryOp::Div, Type::F32, FloatMods { precision, ftz, ..FloatMods::NONE })
            }
        }
    }

    pub fn name(self) -> String {
        self.op().to_string()
    }

    /// A kernel that takes `count` inputs, one per thread.
    fn kernel(self, target: Target, count: u32) -> Result<Kernel, Violations> {
        let mut k = Builder::kernel("approx");
        k.max_threads(THREADS);
        if matches!(self, Subject::Half { format: Packed::Bf16x2, .. }) {
            k.require(7, 8);
        }
        let (x, y, total) = (k.param_pointer("x"), k.param_pointer("y"), k.param_u32("count"));
        let (cta, thread) = (k.special(SpecialReg::CtaidX), k.special(SpecialReg::TidX));
        let i = k.mad(cta, THREADS, thread);
        let outside = k.setp_u(CmpOp::Ge, i, total);
        k.exit_if(outside);
        let (from, to) = (k.index(x, i, 4), k.index(y, i, 4));
        match self {
            Subject::F32 { .. } => {
                let (a, d): (F32, F32) = (k.ld(from), k.reg());
                k.op(self.op(), [d.reg(), a.reg()].map(Operand::Reg));
                k.st(to, d);
            }
            Subject::Half { .. } => {
                let (a, d): (R32, R32) = (k.ld(from), k.reg());
                k.op(self.op(), [d.reg(), a.reg()].map(Operand::Reg));
                k.st(to, d);
            }
            Subject::Div { .. } => {
                let j = k.xor(i, 1);
                let neighbour = k.index(x, j, 4);
                let (a, b, d): (F32, F32, F32) = (k.ld(from), k.ld(neighbour), k.reg());
                k.op(self.op(), [d.reg(), a.reg(), b.reg()].map(Operand::Reg));
                k.st(to, d);
            }
        }
        let buffer =
            |name: &str, access| BufferSpec { name: name.to_owned(), bytes: 4 * count as usize, access };
        Ok(Kernel {
            module: k.into_verified(target)?,
            entry: "approx".to_owned(),
            launch: Launch::new(Dim3(count.div_ceil(THREADS), 1, 1), Dim3(THREADS, 1, 1)),
            buffers: vec![buffer("x", Access::Read), buffer("y", Access::Write)],
            tensor_maps: Vec::new(),
            args: vec![
                Arg::Buffer { index: 0, offset: 0 },
                Arg::Buffer { index: 1, offset: 0 },
                Arg::U32(count),
            ],
        })
    }

    /// Representative inputs: all 16-bit numbers, or `each` mantissas for every sign and exponent.
    pub fn inputs(self, each: u32) -> Vec<u32> {
        match self {
            Subject::F32 { .. } => samples(each),
            Subject::Half { .. } => (0..1 << 16).map(|i| i << 16 | i).collect(),
            // Permuted, so that neighbours have arbitrary exponents. An odd factor permutes indices modulo a
            // power of two.
            Subject::Div { .. } => {
                let samples = samples(each.next_power_of_two());
                let scattered = |i: usize| samples[i.wrapping_mul(0x9e37_79b1) % samples.len()];
                (0..samples.len()).map(scattered).collect()
            }
        }
    }

    /// Runs the instruction on a machine for all inputs. The number of inputs must be even.
    ///
    /// # Errors
    /// When the machine fails, or the verifier rejects the kernel, which is a fault of this program.
    pub fn run<M: Machine>(
        self,
        machine: &mut M,
        target: Target,
        inputs: &[u32],
    ) -> Result<Vec<u32>, ApproxError<M::Error>> {
        let kernel = self.kernel(target, inputs.len() as u32)?;
        let bytes: Vec<u8> = inputs.iter().flat_map(|x| x.to_le_bytes()).collect();
        let mut results = bytes.clone();
        let mut run = || {
            let mut x = machine.allocate(bytes.len())?;
            let mut y = machine.allocate(bytes.len())?;
            machine.upload(&mut x, &bytes)?;
            machine.launch(&kernel, &mut [&mut x, &mut y])?;
            machine.download(&y, &mut results)
        };
        run().map_err(ApproxError::Machine)?;
        Ok(results.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    fn approx_op(self) -> ApproxOp {
        match self {
            Subject::F32 { function, .. } => ApproxOp::F32(function),
            Subject::Half { function, format } => ApproxOp::Half(function, format),
            Subject::Div { division: DivApprox::Approx, .. } => ApproxOp::DivApprox,
            Subject::Div { division: DivApprox::Full, .. } => ApproxOp::DivFull,
        }
    }

    /// Whether the emulator reproduces the bits of this architecture.
    pub fn is_exact(self, sm: u32) -> bool {
        is_exact(self.approx_op(), sm)
    }

    /// Whether PTX permits a result on an architecture whose bits are not known: the result must be within
    /// the bound of the emulated one, which is the rounded true value.
    pub fn admits(self, input: u32, result: u32, emulated: u32) -> bool {
        let bound = error_bound(self.approx_op());
        let Subject::Half { format, .. } = self else {
            let [x, y, z] = [input, result, emulated].map(|bits| f64::from(f32::from_bits(bits)));
            let ulp = f64::from(f32::from_bits(emulated).abs().next_up() - f32::from_bits(emulated).abs());
            // A quotient has two inputs, and its bound does not depend on them.
            return result == emulated || bound.admits(x, y, z, ulp);
        };
        let wide = |bits: u32| match format {
            Packed::F16x2 => half::f16::from_bits(bits as u16).to_f64(),
            Packed::Bf16x2 => half::bf16::from_bits(bits as u16).to_f64(),
        };
        [0, 16].into_iter().all(|shift| {
            let half = |bits: u32| bits >> shift & 0xffff;
            let (y, z) = (half(result), half(emulated));
            let ulp = (wide((z & 0x7fff) + 1) - wide(z & 0x7fff)).abs();
            y == z || bound.admits(wide(half(input)), wide(y), wide(z), ulp)
        })
    }

    /// The emulator's results for the inputs.
    pub fn emulated(self, inputs: &[u32]) -> Vec<u32> {
        let mut results = vec![0; inputs.len()];
        results.par_chunks_mut(4096).zip(inputs.par_chunks(4096)).for_each(|(to, from)| {
            to.chunks_mut(32).zip(from.chunks(32)).for_each(|(to, from)| self.emulate_lanes(to, from));
        });
        results
    }

    fn emulate_lanes(self, to: &mut [u32], from: &[u32]) {
        let (mut a, mut d): (Lanes32, Lanes32) = ([0; 32], [0; 32]);
        a[..from.len()].copy_from_slice(from);
        match self {
            Subject::F32 { function, ftz } => f32_function(function, ftz, u32::MAX, &mut d, &a),
            Subject::Half { function, format } => packed_function(function, format, u32::MAX, &mut d, &a),
            Subject::Div { division, ftz } => {
                for lane in 0..from.len() {
                    d[lane] = div_f32(division, ftz, a[lane], a[lane ^ 1]);
                }
            }
        }
        to.copy_from_slice(&d[..to.len()]);
    }
}

const fn unary(function: Function) -> UnaryOp {
    match function {
        Function::Ex2 => UnaryOp::Ex2,
        Function::Lg2 => UnaryOp::Lg2,
        Function::Rcp => UnaryOp::Rcp,
        Function::Rsqrt => UnaryOp::Rsqrt,
        Function::Sqrt => UnaryOp::Sqrt,
        Function::Sin => UnaryOp::Sin,
        Function::Cos => UnaryOp::Cos,
        Function::Tanh => UnaryOp::Tanh,
    }
}

/// `each` pseudo-random mantissas for every sign and exponent, including zeros, infinities and NaN.
fn samples(each: u32) -> Vec<u32> {
    let drawn = |i: u64| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 37) as u32 & 0x007f_ffff;
    (0..512 * u64::from(each))
        .into_par_iter()
        .map(|i| {
            let (group, index) = ((i / u64::from(each)) as u32, i % u64::from(each));
            // The first of each group is the power of two.
            group << 23 | if index == 0 { 0 } else { drawn(i) }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use emu::Emulator;

    use super::*;

    /// The kernels run in the emulator as on a GPU and give the results of the direct computation.
    #[test]
    fn the_emulator_agrees_with_itself() {
        for subject in Subject::all(90) {
            let inputs = subject.inputs(2);
            let inputs = &inputs[..inputs.len().min(4096)];
            let run = subject.run(&mut Emulator::default(), Target::sm(90), inputs).unwrap();
            let agreement = Agreement::of(subject, inputs, &run, &subject.emulated(inputs));
            assert_eq!(agreement.differing, 0, "{}: {:?}", subject.name(), agreement.first);
            assert_eq!(agreement.results, inputs.len() as u64);
        }
    }
}
