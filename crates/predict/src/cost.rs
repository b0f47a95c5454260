//! The cost of one PTX instruction after ptxas has compiled it: the number of machine instructions, their
//! pipe, and the latency of the result. Counts of expanded operations (division, square root, ex2 without
//! `.ftz`, 64-bit integers) are taken from the code that ptxas 13 generates for sm_80 to sm_90.

use ptx::{
    BinaryOp, Cvt, Imm, Instruction, Mma, MmaShape, Op, Operand, Precision, Space, TernaryOp, Type, UnaryOp,
    Wgmma, WgmmaSource, Wmma, WmmaAccess,
};

use super::machine::{Gpu, TensorRates};
use emu::trace::fragment_accesses;

/// Ticks per clock. A tick is the replay's unit of time. It is a sixteenth of a clock, so that fractional
/// rates such as 6.45 clocks per mma are represented.
pub(super) const TICK: u64 = 16;

/// The pipe that an instruction occupies in addition to its issue slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Pipe {
    /// No pipe.
    #[default]
    None,
    Fma,
    Alu,
    Half,
    Double,
    Mufu,
    Tensor,
}

/// Number of [`Pipe`]s.
pub(super) const PIPES: usize = 7;

/// The cost of an instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cost {
    /// Machine instructions, each of which takes an issue slot. 0 means that ptxas removes the instruction.
    pub slots: u32,
    /// The pipe of the instruction's main part.
    pub pipe: Pipe,
    /// Ticks for which the instruction holds the pipe of its sub-partition.
    pub busy: u32,
    /// Ticks for which its special-function parts hold the MUFU pipe.
    pub mufu: u32,
    /// Clocks from issue to the result.
    pub latency: u32,
    /// Clocks by which a predicate is available earlier to instructions that read it as data.
    pub early: u32,
    /// Floating-point operations per lane. For mma, a thirty-second of the warp's operations.
    pub flops: u32,
}

impl Cost {
    /// The cost of an instruction that ptxas removes.
    pub(super) const FREE: Cost =
        Cost { slots: 0, pipe: Pipe::None, busy: 0, mufu: 0, latency: 0, early: 0, flops: 0 };
}

/// Builds costs for one GPU.
struct Costs<'a>(&'a Gpu);

impl Costs<'_> {
    fn of(&self, pipe: Pipe, slots: u32) -> Cost {
        let (rates, latency) = (&self.0.rates, &self.0.latency);
        let (lanes, latency) = match pipe {
            Pipe::Fma => (rates.fma, latency.alu),
            Pipe::Alu => (rates.alu, latency.alu),
            Pipe::Half => (rates.half2, latency.half2),
            Pipe::Double => (rates.double, latency.double),
            Pipe::Mufu => (rates.mufu, latency.mufu),
            Pipe::None | Pipe::Tensor => return Cost { slots, latency: latency.alu, ..Cost::FREE },
        };
        Cost { slots, pipe, busy: slots * self.warp_ticks(lanes), latency: slots * latency, ..Cost::FREE }
    }

    /// Ticks for which a warp instruction holds its sub-partition's share of a pipe with `lanes` lanes per
    /// SM.
    fn warp_ticks(&self, lanes: u32) -> u32 {
        32 * TICK as u32 * self.0.schedulers / lanes.max(1)
    }

    fn fma(&self, flops: u32) -> Cost {
        Cost { flops, ..self.of(Pipe::Fma, 1) }
    }

    fn imad(&self, slots: u32) -> Cost {
        Cost { busy: slots * self.warp_ticks(self.0.rates.imad), ..self.of(Pipe::Fma, slots) }
    }

    fn alu(&self, slots: u32) -> Cost {
        Cost { latency: self.0.latency.alu * slots.min(2), ..self.of(Pipe::Alu, slots) }
    }

    fn predicate(&self, slots: u32) -> Cost {
        let latency = &self.0.latency;
        Cost { latency: latency.predicate, early: latency.predicate - latency.alu, ..self.alu(slots) }
    }

    /// `around` FMA-pipe instructions and `special` MUFU instructions. All of the MUFU instructions and
    /// `chain` of the FMA-pipe instructions are on the critical path.
    fn special(&self, special: u32, around: u32, chain: u32) -> Cost {
        let mufu = special * self.warp_ticks(self.0.rates.mufu);
        let latency = special * self.0.latency.mufu + chain * self.0.latency.alu;
        Cost { mufu, latency, slots: around + special, flops: 1, ..self.of(Pipe::Fma, around) }
    }

    fn lsu(&self, latency: u32) -> Cost {
        Cost { slots: 1, latency, ..Cost::FREE }
    }
}

/// The cost of an instruction by itself, before it is folded into its neighbours.
pub(super) fn cost(instruction: &Instruction, gpu: &Gpu) -> Cost {
    let c = Costs(gpu);
    let operands = &instruction.operands;
    match instruction.op {
        Op::Unary(op, ty, mods) => unary(&c, op, ty, mods.ftz, mods.precision),
        Op::Binary(op, ty, mods) => binary(&c, op, ty, mods.precision, operands),
        Op::Ternary(op, ty, _) => ternary(&c, op, ty),
        Op::Carry(..) | Op::Lop3(_) | Op::Shf(..) | Op::Prmt(_) => c.alu(1),
        Op::Dp4a(..) | Op::Dp2a(..) => c.imad(1),
        Op::Setp { ty, .. } if ty.bits() == 64 && ty.is_float() => c.of(Pipe::Double, 1),
        Op::Setp { ty, .. } if half(ty) => Cost { latency: gpu.latency.predicate, ..c.of(Pipe::Half, 1) },
        Op::Setp { ty, .. } => c.predicate(ty.bits().div_ceil(32)),
        Op::Selp(ty) => c.alu(ty.bits().div_ceil(32)),
        Op::Set { .. }
        | Op::Slct { .. }
        | Op::Testp(..)
        | Op::Bfe(_)
        | Op::Bfi(_)
        | Op::Bmsk(_)
        | Op::Szext(..) => c.alu(2),
        Op::Fns => c.alu(20),
        Op::Mov(_) => mov(&c, operands),
        Op::Cvt(cvt) => convert(&c, &cvt),
        Op::CvtPack { .. } => c.alu(1),
        Op::Cvta { .. } => Cost::FREE,
        Op::Isspacep(_) | Op::Mapa { .. } | Op::Getctarank { .. } => c.alu(2),
        Op::Ld(m) if matches!(m.space, Space::Param | Space::Const) => Cost::FREE,
        Op::St(m) if m.space == Space::Param => Cost::FREE,
        Op::Ld(_) | Op::St(_) | Op::Atom(_) | Op::Red(_) | Op::Prefetch(..) | Op::Discard(_) => c.lsu(0),
        Op::CpAsync(_)
        | Op::Ldmatrix(_)
        | Op::Stmatrix(_)
        | Op::Mbarrier(_)
        | Op::CpAsyncMbarrierArrive { .. } => c.lsu(0),
        Op::CreatePolicy(_) => c.alu(1),
        Op::CpAsyncCommitGroup | Op::CpAsyncWaitGroup | Op::CpAsyncWaitAll => c.of(Pipe::None, 1),
        Op::Mma(mma) => tensor(gpu, &mma),
        Op::Wmma(wmma) => whole_product(&c, &wmma),
        Op::WmmaLoad(m) | Op::WmmaStore(m) => fragment(&c, m),
        Op::Shfl(_) | Op::Match(..) | Op::Movmatrix => c.lsu(gpu.latency.shuffle),
        Op::Redux { .. } => Cost { latency: gpu.latency.shuffle, ..c.of(Pipe::Mufu, 1) },
        Op::Vote(_) | Op::Activemask | Op::Elect => c.predicate(1),
        Op::Bar { .. } | Op::BarWarpSync | Op::BarrierCluster(_) => c.of(Pipe::None, 1),
        Op::Membar(_) | Op::Fence(..) | Op::FenceProxy(_) | Op::FenceMbarrierInit => c.of(Pipe::None, 1),
        Op::Bra { .. } | Op::BrxIdx { .. } | Op::Call { .. } | Op::Ret { .. } | Op::Exit => {
            c.of(Pipe::None, 1)
        }
        Op::Wgmma(w) => warpgroup_product(gpu, &w),
        // The replay accounts for the time of the asynchronous unit.
        Op::CpAsyncBulk(_)
        | Op::CpReduceAsyncBulk(_)
        | Op::CpAsyncBulkTensor(_)
        | Op::CpReduceAsyncBulkTensor(_)
        | Op::CpAsyncBulkPrefetch { .. }
        | Op::CpAsyncBulkPrefetchTensor { .. }
        | Op::CpAsyncBulkCommitGroup
        | Op::CpAsyncBulkWaitGroup { .. }
        | Op::StAsync(_)
        | Op::RedAsync(_)
        | Op::FenceTensormap(..)
        | Op::TensormapReplace { .. }
        | Op::TensormapCopy(_)
        // The time model knows no GPU that has tensor memory or cancels clusters.
        | Op::Tcgen05Alloc { .. }
        | Op::Tcgen05Dealloc { .. }
        | Op::Tcgen05Relinquish { .. }
        | Op::Tcgen05Ld(_)
        | Op::Tcgen05St(_)
        | Op::Tcgen05Wait { .. }
        | Op::Tcgen05Fence { .. }
        | Op::Tcgen05Commit { .. }
        | Op::Tcgen05Cp { .. }
        | Op::Tcgen05Shift { .. }
        | Op::Tcgen05Mma(_)
        | Op::TryCancel { .. }
        | Op::QueryCancel(_)
        | Op::WgmmaFence
        | Op::WgmmaCommitGroup
        | Op::WgmmaWaitGroup => c.of(Pipe::None, 1),
        Op::Trap | Op::Brkpt | Op::Nanosleep | Op::Pmevent | Op::Setmaxnreg(_) | Op::Griddepcontrol(_) => {
            c.of(Pipe::None, 1)
        }
    }
}

fn half(ty: Type) -> bool {
    matches!(ty, Type::F16 | Type::F16x2 | Type::Bf16 | Type::Bf16x2)
}

fn unary(c: &Costs, op: UnaryOp, ty: Type, ftz: bool, precision: Precision) -> Cost {
    let rounded = matches!(precision, Precision::Rounded(_));
    let words = ty.bits().div_ceil(32);
    if ty == Type::F64 && !matches!(op, UnaryOp::Abs | UnaryOp::Neg) {
        return Cost { mufu: c.special(1, 0, 0).mufu, ..c.of(Pipe::Double, 8) };
    }
    match op {
        // Sign operations on floats are modifiers of the instruction that reads the result.
        UnaryOp::Abs | UnaryOp::Neg if ty.is_float() => Cost::FREE,
        UnaryOp::Abs | UnaryOp::Neg | UnaryOp::Not | UnaryOp::Cnot => c.alu(words),
        UnaryOp::Popc | UnaryOp::Clz | UnaryOp::Brev | UnaryOp::Bfind | UnaryOp::BfindShiftamt => {
            c.special(words, words, 1)
        }
        UnaryOp::Ex2 | UnaryOp::Tanh if half(ty) => c.special(if ty.bits() == 32 { 2 } else { 1 }, 1, 1),
        UnaryOp::Tanh => c.special(1, 0, 0),
        UnaryOp::Sin | UnaryOp::Cos => c.special(1, 1, 1),
        // The correctly rounded forms refine the MUFU result and test for the slow path.
        UnaryOp::Rcp | UnaryOp::Sqrt | UnaryOp::Rsqrt if rounded => with_guard(c, c.special(1, 7, 4)),
        UnaryOp::Sqrt => c.special(1, if ftz { 1 } else { 4 }, 1),
        UnaryOp::Rcp | UnaryOp::Rsqrt | UnaryOp::Lg2 | UnaryOp::Ex2 if ftz => c.special(1, 0, 0),
        // For subnormals: a comparison, and a scaling of the argument and of the result, both guarded by the
        // predicate.
        UnaryOp::Rcp | UnaryOp::Rsqrt | UnaryOp::Lg2 | UnaryOp::Ex2 => with_guard(c, c.special(1, 3, 2)),
    }
}

/// Adds the latency of a predicate within the expansion.
fn with_guard(c: &Costs, cost: Cost) -> Cost {
    Cost { latency: cost.latency + c.0.latency.predicate, ..cost }
}

fn binary(c: &Costs, op: BinaryOp, ty: Type, precision: Precision, operands: &[Operand]) -> Cost {
    use BinaryOp as B;
    let words = ty.bits().div_ceil(32);
    match op {
        B::And | B::Or | B::Xor if ty == Type::Pred => c.predicate(1),
        B::Add | B::Sub | B::Mul if ty == Type::F64 => Cost { flops: 1, ..c.of(Pipe::Double, 1) },
        B::Add | B::Sub | B::Mul | B::Min | B::Max if half(ty) => {
            Cost { flops: ty.bits() / 16, ..c.of(Pipe::Half, 1) }
        }
        B::Add | B::Sub | B::Mul if ty.is_float() => c.fma(1),
        B::Min | B::Max if ty == Type::F64 => c.of(Pipe::Double, 2),
        B::Min | B::Max => c.alu(if words == 2 { 4 } else { 1 }),
        B::Div | B::Rem => division(c, ty, precision, operands.get(2)),
        B::MulLo | B::Mul24Lo | B::Mul if words == 2 => c.imad(4),
        B::MulLo | B::Mul24Lo | B::Mul => c.imad(1),
        B::MulHi | B::Mul24Hi => c.imad(if words == 2 { 12 } else { 2 }),
        B::MulWide => Cost { busy: 2 * c.imad(1).busy, ..c.imad(1) },
        B::Add | B::Sub | B::And | B::Or | B::Xor | B::Shl | B::Shr => c.alu(words),
        B::Copysign => c.alu(1),
    }
}

fn division(c: &Costs, ty: Type, precision: Precision, divisor: Option<&Operand>) -> Cost {
    match (ty, divisor) {
        (Type::F32, _) if matches!(precision, Precision::Rounded(_)) => {
            Cost { flops: 1, ..with_guard(c, c.special(1, 9, 6)) }
        }
        (Type::F64, _) => Cost { mufu: c.special(1, 0, 0).mufu, flops: 1, ..c.of(Pipe::Double, 10) },
        (_, _) if ty.is_float() => c.special(1, 4, 3),
        (_, Some(Operand::Imm(Imm::Int(n)))) if n.count_ones() == 1 => c.alu(ty.bits().div_ceil(32)),
        (_, Some(Operand::Imm(_))) => c.imad(if ty.bits() == 64 { 16 } else { 3 }),
        // I2F, MUFU.RCP, F2I and two predicated corrections. 64-bit division is a subroutine.
        _ if ty.bits() == 64 => c.special(3, 90, 60),
        _ => with_guard(c, c.special(3, 14, 10)),
    }
}

fn ternary(c: &Costs, op: TernaryOp, ty: Type) -> Cost {
    use TernaryOp as T;
    match op {
        T::Fma | T::Mad if ty == Type::F64 => Cost { flops: 2, ..c.of(Pipe::Double, 1) },
        T::Fma | T::Mad if half(ty) => Cost { flops: ty.bits() / 8, ..c.of(Pipe::Half, 1) },
        T::Fma | T::Mad => c.fma(2),
        T::MadLo | T::Mad24Lo => c.imad(if ty.bits() == 64 { 4 } else { 1 }),
        T::MadHi | T::Mad24Hi => c.imad(2),
        T::MadWide => Cost { busy: 2 * c.imad(1).busy, ..c.imad(1) },
        T::Sad => c.alu(2),
        T::Min | T::Max => c.alu(1),
    }
}

fn mov(c: &Costs, operands: &[Operand]) -> Cost {
    match (operands.first(), operands.get(1)) {
        // S2R.
        (_, Some(Operand::Special(_))) => Cost { latency: c.0.latency.shuffle, ..c.alu(1) },
        // Packing halves is a PRMT. Packing words, and unpacking, only renames registers.
        (Some(Operand::Reg(_)), Some(Operand::Vector(parts))) if parts.len() > 2 => {
            c.alu(parts.len() as u32 - 1)
        }
        _ => Cost::FREE,
    }
}

fn convert(c: &Costs, cvt: &Cvt) -> Cost {
    let (to, from) = (cvt.to, cvt.from);
    match (to.is_float(), from.is_float()) {
        (false, false) if cvt.saturation != ptx::CvtSaturation::None => c.alu(2),
        // Only the widening of a signed value costs an instruction. Other conversions rename registers or are
        // done by the load.
        (false, false) => c.alu(u32::from(from.is_signed() && to.bits() > from.bits())),
        _ if to == Type::F64 || from == Type::F64 => c.special(1, 0, 0),
        // I2FP, also for narrower values, which a load has widened.
        (true, false) if c.0.sm >= 86 && from.bits() <= 32 => c.alu(1),
        (true, false) | (false, true) => c.special(1, 0, 0),
        (true, true) if to == from && cvt.rounding.is_some() => c.special(1, 0, 0),
        (true, true) => c.of(Pipe::Half, 1),
    }
}

fn tensor(gpu: &Gpu, mma: &Mma) -> Cost {
    let flops = 2 * u32::from(mma.shape.m) * u32::from(mma.shape.n) * u32::from(mma.shape.k);
    let rate = tensor_rate(&gpu.tensor, mma.a, mma.d);
    let busy = u64::from(flops) * TICK * u64::from(gpu.schedulers) / u64::from(rate.max(1));
    let row_bits = u32::from(mma.shape.k) * mma.a.bits();
    let latency = if row_bits <= 128 { gpu.latency.mma_k8 } else { gpu.latency.mma_k16 };
    Cost {
        slots: 1,
        pipe: Pipe::Tensor,
        busy: busy as u32,
        mufu: 0,
        early: 0,
        latency: latency.max(busy as u32 / TICK as u32),
        flops: flops / 32,
    }
}

/// A warp's quarter of a product of 64 rows. Its time is the larger of two: the time of its sub-partition's
/// tensor core, and the time of shared memory to deliver B to all four sub-partitions, and A if A is in
/// shared memory.
fn warpgroup_product(gpu: &Gpu, w: &Wgmma) -> Cost {
    let (n, k) = (u64::from(w.shape.n), u64::from(w.shape.k));
    let flops = 2 * 16 * n * k;
    let rate = gpu.units.map_or(0, |u| tensor_rate(&u.wgmma, w.a, w.d)).max(1);
    let tensor = flops * TICK * u64::from(gpu.schedulers) / u64::from(rate);
    let rows = if w.a_source == WgmmaSource::Shared { n + u64::from(Wgmma::ROWS) } else { n };
    let operands = rows * k * u64::from(w.a.bits()) / 8 * TICK / u64::from(gpu.memory.l1_bandwidth);
    let busy = tensor.max(operands) as u32;
    Cost { slots: 1, busy, latency: 1, flops: (flops / 32) as u32, ..Cost::FREE }
}

fn tensor_rate(rates: &TensorRates, inputs: Type, sum: Type) -> u32 {
    match (inputs, sum) {
        (Type::F16, Type::F16) => rates.f16_f16,
        (Type::Tf32, _) => rates.tf32,
        (Type::E4m3 | Type::E5m2, _) => rates.fp8,
        (Type::F64, _) => rates.f64,
        (Type::F16 | Type::Bf16, _) => rates.f16_f32,
        _ => rates.int8,
    }
}

/// `wmma.mma`: two independent `mma` with 16×8 sums. tf32 takes two k4 products for each, f64 a single `mma`.
fn whole_product(c: &Costs, w: &Wmma) -> Cost {
    let (m, k) = match w.a {
        Type::Tf32 => (16, 4),
        Type::F64 => (8, 4),
        _ => (16, w.shape.k),
    };
    // Sums of mixed types are f32. C is widened, or D rounded, two elements per instruction.
    let (sum, conversions) = match (w.c, w.d) {
        (Type::F16, Type::F32) => (Type::F32, 8),
        (Type::F32, Type::F16) => (Type::F32, 4),
        _ => (w.d, 0),
    };
    let tile = tensor(c.0, &Mma::new(MmaShape { m, n: 8, k }, sum, w.a, w.b, sum));
    let chain = u32::from(w.shape.k.checked_div(k).unwrap_or(1));
    let side_by_side = u32::from(w.shape.m) * u32::from(w.shape.n) / (8 * u32::from(m));
    let count = chain * side_by_side.max(1);
    let convert = if conversions > 0 { c.0.latency.half2 } else { 0 };
    Cost {
        slots: count + conversions,
        busy: count.saturating_mul(tile.busy),
        latency: chain * tile.latency + (count - chain).saturating_mul(tile.busy) / TICK as u32 + convert,
        flops: count.saturating_mul(tile.flops),
        ..tile
    }
}

/// `wmma.load` and `wmma.store`: the LDSM, LDS, LDG, STS or STG instructions and, for halves transposed in
/// memory, MOVM. The lane-dependent part of the address is computed once for all accesses with the same
/// stride.
fn fragment(c: &Costs, access: WmmaAccess) -> Cost {
    let Some((accesses, transposes)) = fragment_accesses(access) else { return c.lsu(0) };
    let latency = if transposes > 0 { c.0.latency.shuffle } else { 0 };
    Cost { slots: accesses + transposes, ..c.lsu(latency) }
}
