//! Tensor memory and the products of the fifth generation of tensor cores (PTX ISA, "TensorCore 5th
//! Generation Family Instructions").

use smallvec::smallvec;

use super::requirement::need_specific;
use super::signature::{address, optional, read, value, write};
use super::syntax::{names, start};
use crate::verify::rules::{constant, ensure, range};
use crate::verify::{Fault, Rule, fault};
use crate::{Instruction, Op, Requirement, Signature, SlotKind, Space, Type};

/// The CTAs whose tensor memory an instruction accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CtaGroup {
    /// The CTA of the executing thread.
    One,
    /// Two CTAs of a cluster whose ranks differ in the last bit.
    Two,
}

impl CtaGroup {
    /// The number of CTAs.
    pub const fn ctas(self) -> usize {
        match self {
            CtaGroup::One => 1,
            CtaGroup::Two => 2,
        }
    }
}

/// The shape of a `tcgen05.ld` or `tcgen05.st`: lanes of tensor memory × bits of each lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorMoveShape {
    /// `.32x32b`: thread `t` has lane `t`.
    Lanes32,
    /// `.16x64b`
    Bits64,
    /// `.16x128b`
    Bits128,
    /// `.16x256b`
    Bits256,
    /// `.16x32bx2`: two accesses of 16 lanes × 32 bits. A constant gives the distance in columns.
    TwoHalves,
}

impl TensorMoveShape {
    /// 32-bit registers per thread for one repetition.
    pub const fn registers(self) -> usize {
        match self {
            TensorMoveShape::Lanes32 | TensorMoveShape::Bits64 | TensorMoveShape::TwoHalves => 1,
            TensorMoveShape::Bits128 => 2,
            TensorMoveShape::Bits256 => 4,
        }
    }
}

/// The shape of a `tcgen05.ld` or `tcgen05.st` and its modifiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorMove {
    /// Lanes and bits of one repetition.
    pub shape: TensorMoveShape,
    /// Number of repetitions along the columns: `.x1` to `.x128`.
    pub repeat: u8,
    /// `.pack::16b` or `.unpack::16b`: a register holds the low halves of two columns.
    pub halves: bool,
}

impl TensorMove {
    /// 32-bit registers per thread.
    pub const fn registers(&self) -> usize {
        self.shape.registers() * self.repeat as usize
    }
}

/// The element types of a `tcgen05.mma`. The instruction descriptor selects among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorKind {
    /// f16 and bf16.
    F16,
    /// tf32.
    Tf32,
    /// Floats of 8, 6 and 4 bits.
    F8f6f4,
    /// 8-bit integers.
    I8,
    /// Floats of 8, 6 and 4 bits with a scale for each 32 elements of K.
    Mxf8f6f4,
    /// Floats of 4 bits with a scale for each 32 elements of K.
    Mxf4,
    /// Floats of 4 bits with a scale for each 16 or 32 elements of K.
    Mxf4nvf4,
}

impl TensorKind {
    /// Whether scales of blocks are operands.
    pub const fn has_block_scales(self) -> bool {
        matches!(self, TensorKind::Mxf8f6f4 | TensorKind::Mxf4 | TensorKind::Mxf4nvf4)
    }
}

/// The number of scales of a row of A or a column of B, or the elements of K that share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleVector {
    /// `.scale_vec::1X`
    One,
    /// `.scale_vec::2X`
    Two,
    /// `.scale_vec::4X`
    Four,
    /// `.block16`
    Block16,
    /// `.block32`
    Block32,
}

/// `tcgen05.mma`: D = A·B, or D + A·B, with D in tensor memory (PTX ISA, "tcgen05.mma" and
/// "tcgen05.mma.ws").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorProduct {
    /// The CTAs that hold A, B and D.
    pub group: CtaGroup,
    /// The element types.
    pub kind: TensorKind,
    /// `.ws`: weight stationary.
    pub stationary: bool,
    /// Whether A is in tensor memory. In the text, only the operand itself shows the location.
    pub a_in_tensor_memory: bool,
    /// Whether a vector of lanes that keep their D is an operand (`disable-output-lane`).
    pub masks_lanes: bool,
    /// The scales of a kind that has block scales, if the text names them.
    pub scales: Option<ScaleVector>,
}

impl TensorProduct {
    /// The position of the predicate `enable-input-d`.
    pub const fn adds_position(&self) -> usize {
        4 + if self.kind.has_block_scales() { 2 } else { self.masks_lanes as usize }
    }

    /// The number of registers of `disable-output-lane`: a bit for each lane.
    pub const fn mask_registers(&self) -> usize {
        4 * self.group.ctas()
    }
}

/// The rows and bits that `tcgen05.cp` copies, and the quarters of tensor memory that receive them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorCopyShape {
    /// `.128x256b`
    Rows128Bits256,
    /// `.4x256b`
    Rows4Bits256,
    /// `.128x128b`
    Rows128Bits128,
    /// `.64x128b.warpx2::02_13`
    Rows64Pairs02,
    /// `.64x128b.warpx2::01_23`
    Rows64Pairs01,
    /// `.32x128b.warpx4`
    Rows32,
}

/// The elements that `tcgen05.cp` widens to bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorUnpack {
    /// `.b8x16.b6x16_p32`: 16 elements of 6 bits and 32 bits of padding.
    Six,
    /// `.b8x16.b4x16_p64`: 16 elements of 4 bits and 64 bits of padding.
    Four,
}

names! {
    CtaGroup { One = "cta_group::1", Two = "cta_group::2" }
    TensorMoveShape {
        Lanes32 = "32x32b", Bits64 = "16x64b", Bits128 = "16x128b", Bits256 = "16x256b",
        TwoHalves = "16x32bx2",
    }
    TensorKind {
        F16 = "kind::f16", Tf32 = "kind::tf32", F8f6f4 = "kind::f8f6f4", I8 = "kind::i8",
        Mxf8f6f4 = "kind::mxf8f6f4", Mxf4 = "kind::mxf4", Mxf4nvf4 = "kind::mxf4nvf4",
    }
    ScaleVector {
        One = "scale_vec::1X", Two = "scale_vec::2X", Four = "scale_vec::4X", Block16 = "block16",
        Block32 = "block32",
    }
    TensorCopyShape {
        Rows128Bits256 = "128x256b", Rows4Bits256 = "4x256b", Rows128Bits128 = "128x128b",
        Rows64Pairs02 = "64x128b.warpx2::02_13", Rows64Pairs01 = "64x128b.warpx2::01_23",
        Rows32 = "32x128b.warpx4",
    }
    TensorUnpack { Six = "b8x16.b6x16_p32", Four = "b8x16.b4x16_p64" }
}

start! {
    TensorMove = TensorMove { shape: TensorMoveShape::Lanes32, repeat: 1, halves: false };
    TensorProduct = TensorProduct {
        group: CtaGroup::One,
        kind: TensorKind::F16,
        stationary: false,
        a_in_tensor_memory: false,
        masks_lanes: false,
        scales: None,
    };
}

const REPEATS: &[(u8, &str)] =
    &[(1, "x1"), (2, "x2"), (4, "x4"), (8, "x8"), (16, "x16"), (32, "x32"), (64, "x64"), (128, "x128")];

/// Hints about buffers of A or B. They change no result.
const COLLECTORS: &[&str] = &[
    "collector::a::fill",
    "collector::a::use",
    "collector::a::lastuse",
    "collector::a::discard",
    "collector::b0::fill",
    "collector::b0::use",
    "collector::b0::lastuse",
    "collector::b0::discard",
    "collector::b1::fill",
    "collector::b1::use",
    "collector::b1::lastuse",
    "collector::b1::discard",
    "collector::b2::fill",
    "collector::b2::use",
    "collector::b2::lastuse",
    "collector::b2::discard",
    "collector::b3::fill",
    "collector::b3::use",
    "collector::b3::lastuse",
    "collector::b3::discard",
];

const TENSOR: Requirement = need_specific(86, 100);

/// An address in tensor memory: 32 bits, the lane in the upper half and the column in the lower.
const TENSOR_ADDRESS: SlotKind = SlotKind::TensorAddress;

instructions! { ($) tcgen05 tcgen05_list

    /// `[a], n`: allocates `n` columns of tensor memory and writes their address to shared memory. PTX ISA,
    /// "tcgen05.alloc".
    Tcgen05Alloc {
        /// The CTAs that allocate.
        group: CtaGroup,
        /// The space of the address.
        space: Space,
    } => {
        text: |m| {
            m.head("tcgen05.alloc")?;
            m.one(group, "`.cta_group::1` or `.cta_group::2`", CtaGroup::NAMES)?;
            m.aligned()?;
            // ptxas does not take `.shared` here.
            m.optional(space, Space::Generic, &[(Space::Shared, "shared::cta")])?;
            m.word("b32")
        },
        operands: smallvec![address(space), read(value(Type::U32))],
        needs: TENSOR,
        check: |inst| columns(constant(inst, 1)),
        accesses: |position| (position == 0).then_some(4),
    }

    /// `a, n`: frees `n` columns of tensor memory. PTX ISA, "tcgen05.dealloc".
    Tcgen05Dealloc {
        /// The CTAs that take part.
        group: CtaGroup,
    } => {
        text: |m| {
            m.head("tcgen05.dealloc")?;
            m.one(group, "`.cta_group::1` or `.cta_group::2`", CtaGroup::NAMES)?;
            m.aligned()?;
            m.word("b32")
        },
        operands: smallvec![read(value(Type::B32)), read(value(Type::U32))],
        needs: TENSOR,
        check: |inst| columns(constant(inst, 1)),
    }

    /// No operands: the CTA allocates no more tensor memory. PTX ISA, "tcgen05.relinquish_alloc_permit".
    Tcgen05Relinquish {
        /// The CTAs that take part.
        group: CtaGroup,
    } => {
        text: |m| {
            m.head("tcgen05.relinquish_alloc_permit")?;
            m.one(group, "`.cta_group::1` or `.cta_group::2`", CtaGroup::NAMES)?;
            m.aligned()
        },
        operands: Signature::new(),
        needs: TENSOR,
    }

    /// `{d…}, [a], distance?`: loads from tensor memory to registers. PTX ISA, "tcgen05.ld".
    Tcgen05Ld(moved: TensorMove) => {
        text: |m| {
            m.head("tcgen05.ld")?;
            m.unsupported(&["red"], "loads with a reduction are not implemented")?;
            m.aligned()?;
            m.one(&mut moved.shape, "a shape such as `.32x32b`", TensorMoveShape::NAMES)?;
            m.one(&mut moved.repeat, "a number such as `.x1`", REPEATS)?;
            m.flag(&mut moved.halves, "pack::16b")?;
            m.word("b32")
        },
        operands: {
            let mut all: Signature =
                smallvec![write(SlotKind::Vector(Type::B32, moved.registers())), read(TENSOR_ADDRESS)];
            all.extend(distance(&moved));
            all
        },
        accepts: repeats(&moved),
        needs: TENSOR,
    }

    /// `[a], distance?, {b…}`: stores registers to tensor memory. PTX ISA, "tcgen05.st".
    Tcgen05St(moved: TensorMove) => {
        text: |m| {
            m.head("tcgen05.st")?;
            m.aligned()?;
            m.one(&mut moved.shape, "a shape such as `.32x32b`", TensorMoveShape::NAMES)?;
            m.one(&mut moved.repeat, "a number such as `.x1`", REPEATS)?;
            m.flag(&mut moved.halves, "unpack::16b")?;
            m.word("b32")
        },
        operands: {
            let mut all: Signature = smallvec![read(TENSOR_ADDRESS)];
            all.extend(distance(&moved));
            all.push(read(SlotKind::Vector(Type::B32, moved.registers())));
            all
        },
        accepts: repeats(&moved),
        needs: TENSOR,
    }

    /// No operands: waits for the loads, or the stores, that the warp issued. PTX ISA, "tcgen05.wait".
    Tcgen05Wait {
        /// `.wait::st` rather than `.wait::ld`.
        stores: bool,
    } => {
        text: |m| {
            m.name(stores, &[(false, "tcgen05.wait::ld"), (true, "tcgen05.wait::st")])?;
            m.aligned()
        },
        operands: Signature::new(),
        needs: TENSOR,
    }

    /// No operands: orders the instructions of tensor memory before (after) a synchronisation of threads. PTX
    /// ISA, "tcgen05.fence".
    Tcgen05Fence {
        /// `::after_thread_sync` rather than `::before_thread_sync`.
        after: bool,
    } => {
        text: |m| {
            m.name(after, &[
                (false, "tcgen05.fence::before_thread_sync"),
                (true, "tcgen05.fence::after_thread_sync"),
            ])
        },
        operands: Signature::new(),
        needs: TENSOR,
    }

    /// `[mbarrier], mask?`: the mbarrier counts an arrival when the products and copies that the thread
    /// issued are complete. With `multicast`, each CTA of the mask counts one. PTX ISA, "tcgen05.commit".
    Tcgen05Commit {
        /// The CTAs whose instructions are complete.
        group: CtaGroup,
        /// The space of the address.
        space: Space,
        /// `.multicast::cluster`
        multicast: bool,
    } => {
        text: |m| {
            m.head("tcgen05.commit")?;
            m.one(group, "`.cta_group::1` or `.cta_group::2`", CtaGroup::NAMES)?;
            m.word("mbarrier::arrive::one")?;
            m.space(space)?;
            m.flag(multicast, "multicast::cluster")?;
            m.word("b64")
        },
        operands: {
            let mut all: Signature = smallvec![address(space)];
            all.extend(multicast.then_some(read(value(Type::U16))));
            all
        },
        accepts: ensure(matches!(space, Space::Generic | Space::SharedCluster), || {
            "tcgen05.commit arrives at an mbarrier in .shared::cluster".into()
        }),
        needs: TENSOR,
        accesses: |position| (position == 0).then_some(8),
    }

    /// `[a], s-desc`: copies shared memory to tensor memory. PTX ISA, "tcgen05.cp".
    Tcgen05Cp {
        /// The CTAs that copy.
        group: CtaGroup,
        /// The rows, and the lanes that receive them.
        shape: TensorCopyShape,
        /// The elements that become bytes.
        unpack: Option<TensorUnpack>,
    } => {
        text: |m| {
            m.head("tcgen05.cp")?;
            m.one(group, "`.cta_group::1` or `.cta_group::2`", CtaGroup::NAMES)?;
            m.one(shape, "a shape such as `.128x256b`", TensorCopyShape::NAMES)?;
            m.maybe(unpack, TensorUnpack::NAMES)
        },
        operands: smallvec![read(TENSOR_ADDRESS), read(value(Type::B64))],
        needs: TENSOR,
    }

    /// `[a]`: moves the rows of 256 bits of tensor memory down by one lane. PTX ISA, "tcgen05.shift".
    Tcgen05Shift {
        /// The CTAs that take part.
        group: CtaGroup,
    } => {
        text: |m| {
            m.head("tcgen05.shift")?;
            m.one(group, "`.cta_group::1` or `.cta_group::2`", CtaGroup::NAMES)?;
            m.word("down")
        },
        operands: smallvec![read(TENSOR_ADDRESS)],
        needs: TENSOR,
    }

    /// `[d], a, b-desc, idesc`, then `disable-output-lane`?, or for kinds with block scales `[scale-a],
    /// [scale-b]`, then the predicate `enable-input-d`, then `scale-input-d`? or with `.ws` a
    /// `zero-column-mask`?. `a` is a descriptor or an address of tensor memory. PTX ISA, "tcgen05.mma".
    Tcgen05Mma(product: TensorProduct) => {
        text: |m| {
            m.head("tcgen05.mma")?;
            m.unsupported(&["sp"], "the operands of `tcgen05.mma` are dense")?;
            m.unsupported(&["ashift"], "rows of A that are shifted are not implemented")?;
            m.flag(&mut product.stationary, "ws")?;
            m.one(&mut product.group, "`.cta_group::1` or `.cta_group::2`", CtaGroup::NAMES)?;
            m.one(&mut product.kind, "a kind such as `.kind::f16`", TensorKind::NAMES)?;
            if product.kind.has_block_scales() {
                m.word("block_scale")?;
                m.maybe(&mut product.scales, ScaleVector::NAMES)?;
            }
            for hint in COLLECTORS {
                m.redundant(hint);
            }
            Ok(())
        },
        operands: operands_of(&product),
        accepts: product_exists(&product),
        needs: TENSOR,
        check: |inst| scaled(&product, inst),
    }
}

impl Op {
    /// The CTAs that an instruction of tensor memory names.
    pub const fn cta_group(&self) -> Option<CtaGroup> {
        match *self {
            Op::Tcgen05Alloc { group, .. }
            | Op::Tcgen05Dealloc { group }
            | Op::Tcgen05Relinquish { group }
            | Op::Tcgen05Commit { group, .. }
            | Op::Tcgen05Cp { group, .. }
            | Op::Tcgen05Shift { group }
            | Op::Tcgen05Mma(TensorProduct { group, .. }) => Some(group),
            _ => None,
        }
    }
}

/// The constant of `.16x32bx2`.
fn distance(moved: &TensorMove) -> Option<crate::Slot> {
    (moved.shape == TensorMoveShape::TwoHalves).then_some(read(SlotKind::Constant))
}

fn repeats(moved: &TensorMove) -> Result<(), String> {
    ensure(moved.registers() <= 128, || {
        format!(
            "tcgen05.ld and tcgen05.st of .{} have at most .x{}, not .x{}",
            moved.shape.name(),
            128 / moved.shape.registers(),
            moved.repeat
        )
    })
}

/// Checks a constant number of columns.
fn columns(count: Option<i64>) -> Result<(), Fault> {
    match count {
        Some(count) if !matches!(count, 32 | 64 | 128 | 256 | 512) => fault(
            Rule::Constant,
            format!("invalid value '{count}' for nCols: expected a power of two from 32 to 512"),
        ),
        _ => Ok(()),
    }
}

fn operands_of(product: &TensorProduct) -> Signature {
    let a = if product.a_in_tensor_memory { TENSOR_ADDRESS } else { value(Type::B64) };
    let mut all: Signature =
        smallvec![read(TENSOR_ADDRESS), read(a), read(value(Type::B64)), read(value(Type::B32))];
    if product.kind.has_block_scales() {
        all.extend([read(TENSOR_ADDRESS), read(TENSOR_ADDRESS)]);
    } else if product.masks_lanes {
        all.push(read(SlotKind::Vector(Type::B32, product.mask_registers())));
    }
    all.push(read(value(Type::Pred)));
    if product.stationary {
        all.push(optional(value(Type::B64)));
    } else if matches!(product.kind, TensorKind::F16 | TensorKind::Tf32) {
        all.push(optional(SlotKind::Constant));
    }
    all
}

fn product_exists(product: &TensorProduct) -> Result<(), String> {
    use ScaleVector as S;
    let TensorProduct { group, kind, stationary, scales, .. } = *product;
    let plain = group == CtaGroup::One && !kind.has_block_scales() && !product.masks_lanes;
    ensure(!stationary || plain, || {
        "tcgen05.mma.ws has .cta_group::1, no block scales and no disabled lanes".into()
    })?;
    let accepted: &[S] = match kind {
        TensorKind::Mxf8f6f4 => &[S::One, S::Block32],
        TensorKind::Mxf4 => &[S::Two, S::Block32],
        _ => &[S::Two, S::Four, S::Block16, S::Block32],
    };
    match scales {
        Some(scales) => ensure(accepted.contains(&scales), || {
            format!("tcgen05.mma of .{} has no .{}", kind.name(), scales.name())
        }),
        None => ensure(kind != TensorKind::Mxf4nvf4, || {
            "tcgen05.mma of .kind::mxf4nvf4 names the scales, as in .scale_vec::4X".into()
        }),
    }
}

/// The power of two by which `scale-input-d` divides D.
fn scaled(product: &TensorProduct, inst: &Instruction) -> Result<(), Fault> {
    range("scale-input-d", constant(inst, product.adds_position() + 1), 0, 15)
}
