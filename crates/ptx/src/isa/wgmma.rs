//! Matrix products of a warpgroup, four warps (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions").

use smallvec::smallvec;

use super::MmaShape;
use super::requirement::need_specific;
use super::signature::{read, value};
use super::syntax::start;
use crate::verify::rules::{constant, ensure, range};
use crate::verify::{Fault, Rule, fault};
use crate::{Flow, Instruction, Signature, Slot, SlotKind, Type};

/// The location of A of a `wgmma`; B is always in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WgmmaSource {
    /// Four 32-bit registers per thread.
    Registers,
    /// Shared memory, addressed by a matrix descriptor.
    Shared,
}

/// `wgmma.mma_async.sync.aligned`: D = A·B, or D + A·B, by four warps (PTX ISA, "Asynchronous Warpgroup Level
/// Matrix Instructions").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wgmma {
    /// m64nNkK.
    pub shape: MmaShape,
    /// Type of D: f32, f16 or s32.
    pub d: Type,
    /// Type of A.
    pub a: Type,
    /// Type of B.
    pub b: Type,
    /// The location of A. In the text, only the operand itself shows the location.
    pub a_source: WgmmaSource,
    /// `.satfinite` (integers).
    pub satfinite: bool,
}

impl Wgmma {
    /// Rows of D.
    pub const ROWS: u16 = 64;
    /// 32-bit registers of A per thread.
    pub const A_REGISTERS: usize = 4;

    /// `m64n<columns>kK`; K is 32 bytes of the input type.
    pub const fn new(columns: u16, d: Type, ab: Type, a_source: WgmmaSource) -> Wgmma {
        let shape = MmaShape { m: Wgmma::ROWS, n: columns, k: (256 / ab.bits()) as u16 };
        // `bits` of tf32 is 32, the space that an element takes.
        Wgmma { shape, d, a: ab, b: ab, a_source, satfinite: false }
    }

    /// 32-bit registers of D per thread. Two f16 share a register.
    pub const fn d_registers(&self) -> usize {
        let elements = self.shape.n as usize / 2;
        if self.d.bits() == 16 { elements / 2 } else { elements }
    }

    /// Whether the instruction takes `imm-scale-a` and `imm-scale-b`. All floating-point forms do.
    pub const fn has_scales(&self) -> bool {
        self.a.is_float()
    }

    /// Whether B, and A in shared memory, may be MN-major (`imm-trans-a`, `imm-trans-b`). Only 16-bit inputs
    /// may.
    pub const fn has_transpose(&self) -> bool {
        self.a.is_float() && self.a.bits() == 16
    }
}

start! {
    Wgmma = Wgmma::new(8, Type::F32, Type::F16, WgmmaSource::Shared);
}

instructions! { ($) wgmma wgmma_list

    /// `{d…}, a, b-desc, scale-d`, then for floats `imm-scale-a, imm-scale-b`, then for 16-bit inputs
    /// `imm-trans-a` (A in shared memory only) and `imm-trans-b`. `a` is a descriptor or `{a0, a1, a2, a3}`;
    /// only the operand itself shows which. The product is added to D when the predicate `scale-d` is true,
    /// else it replaces D. PTX ISA, "wgmma.mma_async".
    Wgmma(wgmma: Wgmma) => {
        text: |m| {
            m.head("wgmma.mma_async")?;
            m.unsupported(&["sp"], "the operands of `wgmma` are dense")?;
            m.aligned()?;
            m.shape(&mut wgmma.shape)?;
            m.ty(&mut wgmma.d)?;
            m.ty(&mut wgmma.a)?;
            m.ty(&mut wgmma.b)?;
            // For 1-bit operands the ISA requires `.and.popc`, although no other operation exists.
            if wgmma.a == Type::B1 {
                m.word("and")?;
                m.word("popc")?;
            }
            m.flag(&mut wgmma.satfinite, "satfinite")
        },
        operands: product(&wgmma),
        accepts: available(&wgmma),
        needs: need_specific(if wgmma.a.is_integer() && wgmma.a != wgmma.b { 84 } else { 80 }, 90),
        check: |inst| if wgmma.has_scales() { factors(&wgmma, inst) } else { Ok(()) },
    }

    /// No operands. Orders accesses to registers and shared memory before the `wgmma`s that follow. PTX ISA,
    /// "wgmma.fence".
    WgmmaFence => {
        text: |m| { m.head("wgmma.fence")?; m.aligned() },
        operands: Signature::new(),
        needs: need_specific(80, 90),
    }

    /// No operands: closes the current group of products. PTX ISA, "wgmma.commit_group".
    WgmmaCommitGroup => {
        text: |m| { m.head("wgmma.commit_group")?; m.aligned() },
        operands: Signature::new(),
        needs: need_specific(80, 90),
    }

    /// `n`: waits until at most the `n` latest groups are pending. PTX ISA, "wgmma.wait_group".
    WgmmaWaitGroup => {
        text: |m| { m.head("wgmma.wait_group")?; m.aligned() },
        operands: smallvec![read(SlotKind::Constant)],
        needs: need_specific(80, 90),
        check: |inst| range(super::PENDING_GROUPS, constant(inst, 0), 0, i64::from(u32::MAX)),
    }
}

fn product(wgmma: &Wgmma) -> Signature {
    let sums = if wgmma.d.bits() == 16 { Type::B32 } else { wgmma.d };
    let from_shared = wgmma.a_source == WgmmaSource::Shared;
    let a = match wgmma.a_source {
        WgmmaSource::Registers => SlotKind::Vector(Type::B32, Wgmma::A_REGISTERS),
        WgmmaSource::Shared => value(Type::B64),
    };
    let d = SlotKind::Vector(sums, wgmma.d_registers());
    let mut s: Signature = smallvec![
        Slot { flow: Flow::ReadWrite, kind: d, optional: false },
        read(a),
        read(value(Type::B64)),
        read(value(Type::Pred))
    ];
    let scales = if wgmma.has_scales() { 2 } else { 0 };
    let transposes = if wgmma.has_transpose() { 1 + usize::from(from_shared) } else { 0 };
    s.extend(std::iter::repeat_n(read(SlotKind::Constant), scales + transposes));
    s
}

/// `imm-scale-a, imm-scale-b` and, for 16-bit inputs, `imm-trans-a, imm-trans-b`.
fn factors(wgmma: &Wgmma, inst: &Instruction) -> Result<(), Fault> {
    let scales = [constant(inst, 4), constant(inst, 5)];
    if let Some(scale) = scales.into_iter().flatten().find(|scale| !matches!(scale, -1 | 1)) {
        return fault(Rule::Constant, format!("a scale of wgmma: {scale} is neither 1 nor -1"));
    }
    let majors = if wgmma.has_transpose() { [constant(inst, 6), constant(inst, 7)] } else { [None, None] };
    majors.into_iter().try_for_each(|major| range("a transposition of wgmma", major, 0, 1))
}

/// Input types with their K and their accumulator types.
struct Family {
    inputs: &'static [Type],
    k: u16,
    sums: &'static [Type],
}

const FAMILIES: [Family; 6] = [
    Family { inputs: &[Type::F16], k: 16, sums: &[Type::F16, Type::F32] },
    Family { inputs: &[Type::Bf16], k: 16, sums: &[Type::F32] },
    Family { inputs: &[Type::Tf32], k: 8, sums: &[Type::F32] },
    Family { inputs: &[Type::E4m3, Type::E5m2], k: 32, sums: &[Type::F16, Type::F32] },
    Family { inputs: &[Type::U8, Type::S8], k: 32, sums: &[Type::S32] },
    Family { inputs: &[Type::B1], k: 256, sums: &[Type::S32] },
];

fn available(wgmma: &Wgmma) -> Result<(), String> {
    let Wgmma { shape: MmaShape { m, n, k }, d, a, b, .. } = *wgmma;
    let family = FAMILIES.iter().find(|f| f.inputs.contains(&a));
    let family = family.ok_or_else(|| format!("wgmma has no inputs of .{a}"))?;
    ensure(family.inputs.contains(&b), || format!("wgmma does not multiply .{a} by .{b}"))?;
    ensure(family.sums.contains(&d), || format!("wgmma of .{a} does not add to .{d}"))?;
    ensure(m == Wgmma::ROWS && k == family.k, || {
        format!("wgmma of .{a} has no shape .{}; it is .m64nNk{}", wgmma.shape, family.k)
    })?;
    let integer = d == Type::S32;
    // Integer inputs have no odd multiples of 8 above 24.
    let columns = (8..=256).contains(&n) && n % if integer && n > 24 { 16 } else { 8 } == 0;
    ensure(columns, || {
        let accepted =
            if integer { "8, 16, 24, or 32 to 256 in steps of 16" } else { "8 to 256 in steps of 8" };
        format!("wgmma of .{a}: invalid value '{n}' for n: expected {accepted}")
    })?;
    ensure(!wgmma.satfinite || integer && a != Type::B1, || ".satfinite is for integer wgmma".into())
}
