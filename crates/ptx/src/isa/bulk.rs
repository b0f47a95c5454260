//! Bulk asynchronous copies and reductions, tensor copies (TMA), and asynchronous stores to other CTAs of the
//! cluster (PTX ISA, "Data Movement and Conversion Instructions: Bulk copy", "Tensor copy", "st.async",
//! "red.async").

use smallvec::smallvec;

use super::AtomicOp;
use super::atomic::OPERATION;
use super::memory::policy;
use super::requirement::need;
use super::signature::{address, read, scalar_or_vector, value};
use super::syntax::{Syntax, start};
use crate::verify::Fault;
use crate::verify::rules::{constant, ensure, multiple, one_of, range};
use crate::{Instruction, Op, Requirement, Signature, Slot, SlotKind, Space, Type};

/// Source and destination of a bulk copy. The route determines the completion mechanism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BulkRoute {
    /// `.shared::cluster.global`: global memory to shared memory of a CTA of the cluster. An mbarrier counts
    /// the bytes.
    GlobalToCluster,
    /// `.shared::cta.global`: global memory to the own CTA's shared memory (`.version` 8.6). An mbarrier
    /// counts the bytes.
    GlobalToCta,
    /// `.shared::cluster.shared::cta`: the own CTA to another CTA. An mbarrier of the other CTA counts the
    /// bytes.
    CtaToCluster,
    /// `.global.shared::cta`: shared to global memory. Completion is tracked by bulk groups.
    CtaToGlobal,
}

impl BulkRoute {
    /// Every route.
    pub const ALL: [BulkRoute; 4] =
        [BulkRoute::GlobalToCluster, BulkRoute::GlobalToCta, BulkRoute::CtaToCluster, BulkRoute::CtaToGlobal];

    /// The source space.
    pub const fn source(self) -> Space {
        match self {
            BulkRoute::GlobalToCluster | BulkRoute::GlobalToCta => Space::Global,
            BulkRoute::CtaToCluster | BulkRoute::CtaToGlobal => Space::Shared,
        }
    }

    /// The destination space.
    pub const fn destination(self) -> Space {
        match self {
            BulkRoute::GlobalToCluster | BulkRoute::CtaToCluster => Space::SharedCluster,
            BulkRoute::GlobalToCta => Space::Shared,
            BulkRoute::CtaToGlobal => Space::Global,
        }
    }

    /// Whether an mbarrier counts the bytes (`.mbarrier::complete_tx::bytes`). Otherwise the copy belongs to
    /// a bulk group.
    pub const fn has_mbarrier(self) -> bool {
        !matches!(self, BulkRoute::CtaToGlobal)
    }

    /// The route between these spaces.
    pub fn between(source: Space, destination: Space) -> Option<BulkRoute> {
        BulkRoute::ALL.into_iter().find(|r| (r.source(), r.destination()) == (source, destination))
    }
}

/// `cp.async.bulk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkCopy {
    /// Source and destination.
    pub route: BulkRoute,
    /// `.multicast::cluster`: the copy goes to the same address in every CTA of a mask.
    pub multicast: bool,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
}

/// `cp.reduce.async.bulk`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkReduce {
    /// `CtaToCluster` or `CtaToGlobal`.
    pub route: BulkRoute,
    /// The operation that combines elements with those at the destination.
    pub op: AtomicOp,
    /// Type of the elements.
    pub ty: Type,
    /// `.noftz` (f16 and bf16, add).
    pub noftz: bool,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
}

/// `cp.async.bulk.tensor`, tile mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkTensor {
    /// `GlobalToCluster`, `GlobalToCta` or `CtaToGlobal`.
    pub route: BulkRoute,
    /// Dimensions of the tensor, 1 to 5.
    pub dims: u8,
    /// `.multicast::cluster`.
    pub multicast: bool,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
}

/// `cp.reduce.async.bulk.tensor`, tile mode, from shared to global memory. The tensor map determines the
/// element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BulkTensorReduce {
    /// Dimensions of the tensor, 1 to 5.
    pub dims: u8,
    /// The operation that combines elements.
    pub op: AtomicOp,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
}

/// `st.async{.shared::cluster}.mbarrier::complete_tx::bytes{.vec}.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StAsync {
    /// `SharedCluster`, or `Generic` where no space is written.
    pub space: Space,
    /// Elements: 1, 2 or 4.
    pub vector: u8,
    /// Type of an element.
    pub ty: Type,
}

impl StAsync {
    /// The bytes that the mbarrier counts.
    pub const fn bytes(&self) -> u32 {
        self.ty.bytes() * self.vector as u32
    }
}

/// `red.async.relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes.op.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RedAsync {
    /// `SharedCluster`, or `Generic` where no space is written.
    pub space: Space,
    /// The operation that combines the value.
    pub op: AtomicOp,
    /// Type of the element.
    pub ty: Type,
}

impl Op {
    /// Whether the operation may store to global memory.
    pub const fn may_store_global(&self) -> bool {
        match self {
            Op::St(memory) => matches!(memory.space, Space::Global | Space::Generic),
            Op::Atom(atomic) | Op::Red(atomic) => matches!(atomic.space, Space::Global | Space::Generic),
            // A copy that an mbarrier counts goes to shared memory.
            Op::CpAsyncBulk(copy) => !copy.route.has_mbarrier(),
            Op::CpAsyncBulkTensor(copy) => !copy.route.has_mbarrier(),
            Op::WmmaStore(_) | Op::CpReduceAsyncBulk(_) | Op::CpReduceAsyncBulkTensor(_) => true,
            _ => false,
        }
    }

    /// The position of a tensor map's address. The coordinates are the next operand.
    pub const fn tensor_map_operand(&self) -> Option<usize> {
        match self {
            Op::CpAsyncBulkTensor(copy) if copy.route.has_mbarrier() => Some(1),
            Op::CpAsyncBulkTensor(_)
            | Op::CpReduceAsyncBulkTensor(_)
            | Op::CpAsyncBulkPrefetchTensor { .. } => Some(0),
            _ => None,
        }
    }
}

start! {
    BulkCopy = BulkCopy { route: BulkRoute::GlobalToCluster, multicast: false, cache_hint: false };
    BulkReduce = BulkReduce {
        route: BulkRoute::CtaToGlobal,
        op: AtomicOp::Add,
        ty: Type::B32,
        noftz: false,
        cache_hint: false,
    };
    BulkTensor = BulkTensor {
        route: BulkRoute::GlobalToCluster,
        dims: 1,
        multicast: false,
        cache_hint: false,
    };
    BulkTensorReduce = BulkTensorReduce { dims: 1, op: AtomicOp::Add, cache_hint: false };
    StAsync = StAsync { space: Space::Generic, vector: 1, ty: Type::B32 };
    RedAsync = RedAsync { space: Space::Generic, op: AtomicOp::Add, ty: Type::B32 };
}

instructions! { ($) bulk bulk_list

    /// `[dst], [src], size, [mbar]` (no `[mbar]` to global memory), then `mask` with `multicast` and `policy`
    /// with `cache_hint`. `size` counts bytes, `mask` has one bit per CTA of the cluster. PTX ISA,
    /// "cp.async.bulk".
    CpAsyncBulk(copy: BulkCopy) => {
        text: |m| {
            m.head("cp.async.bulk")?;
            route(m, &mut copy.route)?;
            m.word(completion(copy.route))?;
            m.flag(&mut copy.multicast, "multicast::cluster")?;
            m.cache_hint(&mut copy.cache_hint)
        },
        operands: with_options(bytes(copy.route), copy.multicast, copy.cache_hint),
        accepts: options(copy.route, copy.multicast, copy.cache_hint),
        needs: route_requirement(copy.route),
        check: |inst| bulk_bytes(inst, 2),
        // The smallest copy has 16 bytes. The mbarrier comes after the size.
        accesses: |position| Some(if position < 2 { 16 } else { 8 }),
    }

    /// `[dst], [src], size, [mbar]` (no `[mbar]` to global memory), then `policy` with `cache_hint`. PTX ISA,
    /// "cp.reduce.async.bulk".
    CpReduceAsyncBulk(reduce: BulkReduce) => {
        text: |m| {
            m.head("cp.reduce.async.bulk")?;
            route(m, &mut reduce.route)?;
            m.word(completion(reduce.route))?;
            m.cache_hint(&mut reduce.cache_hint)?;
            m.one(&mut reduce.op, OPERATION, AtomicOp::NAMES)?;
            m.flag(&mut reduce.noftz, "noftz")?;
            m.ty(&mut reduce.ty)
        },
        operands: with_options(bytes(reduce.route), false, reduce.cache_hint),
        accepts: reduction(&reduce),
        needs: need(80, 90),
        check: |inst| bulk_bytes(inst, 2),
        accesses: |position| Some(if position < 2 { 16 } else { 8 }),
    }

    /// To shared memory: `[dst], [map], {coords}, [mbar]`, then `mask` with `multicast` and `policy` with
    /// `cache_hint`. To global memory: `[map], {coords}, [src]`, then `policy`. In the text, map and
    /// coordinates are one operand: `[map, {x, y}]`. Coordinates are s32, the innermost first. PTX ISA,
    /// "cp.async.bulk.tensor".
    CpAsyncBulkTensor(copy: BulkTensor) => {
        text: |m| {
            m.head("cp.async.bulk.tensor")?;
            box_dims(m, &mut copy.dims)?;
            route(m, &mut copy.route)?;
            m.word(completion(copy.route))?;
            m.flag(&mut copy.multicast, "multicast::cluster")?;
            m.cache_hint(&mut copy.cache_hint)
        },
        operands: {
            let mut s = Signature::new();
            if copy.route.has_mbarrier() {
                s.push(address(copy.route.destination()));
                s.extend(tensor_box(copy.dims));
                s.push(address(copy.route.destination()));
            } else {
                s.extend(tensor_box(copy.dims));
                s.push(address(Space::Shared));
            }
            with_options(s, copy.multicast, copy.cache_hint)
        },
        accepts: {
            dimensions(copy.dims)?;
            ensure(copy.route != BulkRoute::CtaToCluster, || "tensors are copied from or to .global".into())?;
            options(copy.route, copy.multicast, copy.cache_hint)
        },
        needs: route_requirement(copy.route),
        // A box has at least 16 bytes. In a load, the mbarrier comes after the box.
        accesses: |position| Some(if position == 3 { 8 } else { 16 }),
    }

    /// `[map], {coords}, [src]`, then `policy` with `cache_hint`. PTX ISA, "cp.reduce.async.bulk.tensor".
    CpReduceAsyncBulkTensor(reduce: BulkTensorReduce) => {
        text: |m| {
            m.head("cp.reduce.async.bulk.tensor")?;
            box_dims(m, &mut reduce.dims)?;
            let mut written = BulkRoute::CtaToGlobal;
            route(m, &mut written)?;
            if written != BulkRoute::CtaToGlobal {
                m.refuse("a tensor reduction goes from `.shared::cta` to `.global` only")?;
            }
            m.one(&mut reduce.op, OPERATION, AtomicOp::NAMES)?;
            m.word(completion(BulkRoute::CtaToGlobal))?;
            m.cache_hint(&mut reduce.cache_hint)
        },
        operands: {
            let mut s = Signature::from_iter(tensor_box(reduce.dims));
            s.push(address(Space::Shared));
            with_options(s, false, reduce.cache_hint)
        },
        accepts: {
            dimensions(reduce.dims)?;
            let combines = !matches!(reduce.op, AtomicOp::Exch | AtomicOp::Cas);
            ensure(combines, || format!("a tensor reduction has no .{}", reduce.op.name()))
        },
        needs: need(80, 90),
        accesses: |_position| Some(16),
    }

    /// `[src], size`, then `policy` with `cache_hint`: global memory to L2. PTX ISA,
    /// "cp.async.bulk.prefetch".
    CpAsyncBulkPrefetch {
        /// `.L2::cache_hint`.
        cache_hint: bool,
    } => {
        text: |m| {
            m.head("cp.async.bulk.prefetch")?;
            m.word("L2")?;
            m.word("global")?;
            m.cache_hint(cache_hint)
        },
        operands: {
            let s: Signature = smallvec![address(Space::Global), read(value(Type::U32))];
            with_options(s, false, cache_hint)
        },
        needs: need(80, 90),
        check: |inst| bulk_bytes(inst, 1),
        accesses: |_position| Some(16),
    }

    /// `[map], {coords}`, then `policy` with `cache_hint`: a box of a tensor to L2. PTX ISA,
    /// "cp.async.bulk.prefetch.tensor".
    CpAsyncBulkPrefetchTensor {
        /// Dimensions of the tensor, 1 to 5.
        dims: u8,
        /// `.L2::cache_hint`.
        cache_hint: bool,
    } => {
        text: |m| {
            m.head("cp.async.bulk.prefetch.tensor")?;
            box_dims(m, dims)?;
            m.word("L2")?;
            m.word("global")?;
            m.cache_hint(cache_hint)
        },
        operands: with_options(Signature::from_iter(tensor_box(dims)), false, cache_hint),
        accepts: dimensions(dims),
        needs: need(80, 90),
    }

    /// No operands: closes the current bulk group. PTX ISA, "cp.async.bulk.commit_group".
    CpAsyncBulkCommitGroup => {
        text: |m| m.head("cp.async.bulk.commit_group"),
        operands: Signature::new(),
        needs: need(80, 90),
    }

    /// `n`: waits until at most the `n` latest bulk groups are pending. PTX ISA, "cp.async.bulk.wait_group".
    CpAsyncBulkWaitGroup {
        /// `.read`: waits until the sources have been read.
        read: bool,
    } => {
        text: |m| { m.head("cp.async.bulk.wait_group")?; m.flag(read, "read") },
        operands: smallvec![Slot { flow: crate::Flow::Read, kind: SlotKind::Constant, optional: false }],
        needs: need(80, 90),
        check: |inst| range(super::PENDING_GROUPS, constant(inst, 0), 0, i64::from(u32::MAX)),
    }

    /// `[dst], value, [mbar]`, all in one CTA of the cluster; `value` is a vector when `vector` > 1. PTX ISA,
    /// "st.async".
    StAsync(st: StAsync) => {
        text: |m| {
            m.head("st.async")?;
            m.redundant("weak");
            cluster_space(m, "st", &mut st.space)?;
            m.word("mbarrier::complete_tx::bytes")?;
            m.vector(&mut st.vector)?;
            m.ty(&mut st.ty)
        },
        operands: smallvec![address(st.space), read(scalar_or_vector(st.ty, st.vector)), address(st.space)],
        accepts: store(&st),
        needs: need(81, 90),
        accesses: |position| Some(if position == 0 { st.bytes() } else { 8 }),
    }

    /// `[dst], value, [mbar]`, all in one CTA of the cluster. PTX ISA, "red.async".
    RedAsync(red: RedAsync) => {
        text: |m| {
            m.head("red.async")?;
            m.word("relaxed")?;
            m.word("cluster")?;
            cluster_space(m, "red", &mut red.space)?;
            m.word("mbarrier::complete_tx::bytes")?;
            m.one(&mut red.op, OPERATION, AtomicOp::NAMES)?;
            m.ty(&mut red.ty)
        },
        operands: smallvec![address(red.space), read(scalar_or_vector(red.ty, 1)), address(red.space)],
        accepts: asynchronous_reduction(&red),
        needs: need(81, 90),
        accesses: |position| Some(if position == 0 { red.ty.bytes() } else { 8 }),
    }
}

/// State spaces as bulk copies write them. The own CTA's shared memory is `.shared::cta`.
const BULK_SPACES: &[(Space, &str)] = &[
    (Space::Global, "global"),
    (Space::Shared, "shared::cta"),
    (Space::SharedCluster, "shared::cluster"),
    (Space::Local, "local"),
    (Space::Const, "const"),
    (Space::Param, "param"),
];

/// Destination and source.
fn route<S: Syntax>(m: &mut S, route: &mut BulkRoute) -> Result<(), S::Stop> {
    let (mut source, mut destination) = (route.source(), route.destination());
    m.optional(&mut destination, Space::Generic, BULK_SPACES)?;
    m.optional(&mut source, Space::Generic, BULK_SPACES)?;
    match BulkRoute::between(source, destination) {
        Some(known) => *route = known,
        None => m.refuse(format!(
            "invalid value '{} to {}' for the spaces of a bulk copy: expected .global to .shared::cluster or \
             .shared::cta, or .shared::cta to .shared::cluster or .global",
            source.suffix(),
            destination.suffix()
        ))?,
    }
    Ok(())
}

/// The completion mechanism of a route.
const fn completion(route: BulkRoute) -> &'static str {
    if route.has_mbarrier() { "mbarrier::complete_tx::bytes" } else { "bulk_group" }
}

/// `.1d` to `.5d`. `.tile` is the default mode and the only one supported.
fn box_dims<S: Syntax>(m: &mut S, dims: &mut u8) -> Result<(), S::Stop> {
    const DIMS: &[(u8, &str)] = &[(1, "1d"), (2, "2d"), (3, "3d"), (4, "4d"), (5, "5d")];
    m.one(dims, "the dimensions of the tensor, `.1d` to `.5d`", DIMS)?;
    m.redundant("tile");
    m.unsupported(&["im2col", "tile::"], "tensors are copied in `.tile` mode")
}

fn cluster_space<S: Syntax>(m: &mut S, base: &str, space: &mut Space) -> Result<(), S::Stop> {
    m.space(space)?;
    if matches!(space, Space::Generic | Space::SharedCluster) {
        return Ok(());
    }
    m.refuse(format!("`{base}.async` goes to `.shared::cluster`, not to `{}`", space.suffix()))
}

/// Destination, source, size and, for routes with one, the mbarrier.
fn bytes(route: BulkRoute) -> Signature {
    let mut s: Signature =
        smallvec![address(route.destination()), address(route.source()), read(value(Type::U32))];
    s.extend(route.has_mbarrier().then(|| address(route.destination())));
    s
}

/// A tensor map and the coordinates of a box.
fn tensor_box(dims: u8) -> [Slot; 2] {
    [address(Space::Generic), read(SlotKind::Vector(Type::S32, dims.into()))]
}

/// Adds the operands that the modifiers announce.
fn with_options(mut operands: Signature, multicast: bool, cache_hint: bool) -> Signature {
    operands.extend(multicast.then(|| read(value(Type::B16))));
    operands.extend(policy(cache_hint));
    operands
}

fn route_requirement(route: BulkRoute) -> Requirement {
    need(if route == BulkRoute::GlobalToCta { 86 } else { 80 }, 90)
}

/// An mbarrier counts up to 2^20 - 1 bytes (PTX ISA, "mbarrier: Tracking asynchronous operations").
fn bulk_bytes(inst: &Instruction, position: usize) -> Result<(), Fault> {
    let bytes = constant(inst, position);
    range("the bytes of a bulk copy", bytes, 0, (1 << 20) - 16)?;
    multiple("the bytes of a bulk copy", bytes, 16)
}

fn dimensions(dims: u8) -> Result<(), String> {
    ensure((1..=5).contains(&dims), || format!("a tensor has 1 to 5 dimensions, not {dims}"))
}

fn options(route: BulkRoute, multicast: bool, cache_hint: bool) -> Result<(), String> {
    ensure(!multicast || route == BulkRoute::GlobalToCluster, || {
        ".multicast::cluster is for copies from .global to .shared::cluster".into()
    })?;
    ensure(!cache_hint || route != BulkRoute::CtaToCluster, || "a cache policy is for .global".into())
}

/// The accepted reductions (PTX ISA, "cp.reduce.async.bulk").
fn reduction(reduce: &BulkReduce) -> Result<(), String> {
    use Type::{B32, B64, Bf16, F16, F32, F64, S32, S64, U32, U64};
    let what = format!("cp.reduce.async.bulk.{}", reduce.op.name());
    let types: &[Type] = match (reduce.route, reduce.op) {
        (BulkRoute::CtaToCluster, AtomicOp::And | AtomicOp::Or | AtomicOp::Xor) => &[B32],
        (BulkRoute::CtaToCluster, AtomicOp::Add) => &[U32, S32, U64],
        (BulkRoute::CtaToCluster, AtomicOp::Min | AtomicOp::Max) => &[U32, S32],
        (BulkRoute::CtaToCluster | BulkRoute::CtaToGlobal, AtomicOp::Inc | AtomicOp::Dec) => &[U32],
        (BulkRoute::CtaToGlobal, AtomicOp::And | AtomicOp::Or | AtomicOp::Xor) => &[B32, B64],
        (BulkRoute::CtaToGlobal, AtomicOp::Add) => &[U32, S32, U64, F32, F64, F16, Bf16],
        (BulkRoute::CtaToGlobal, AtomicOp::Min | AtomicOp::Max) => &[U32, S32, U64, S64, F16, Bf16],
        (_, AtomicOp::Exch | AtomicOp::Cas) => return Err(format!("there is no {what}")),
        _ => return Err("bulk reductions go from .shared::cta".into()),
    };
    one_of(&what, reduce.ty, types)?;
    let half_sum = reduce.op == AtomicOp::Add && matches!(reduce.ty, F16 | Bf16);
    ensure(reduce.noftz == half_sum, || {
        if half_sum {
            format!("{what}.{} needs .noftz", reduce.ty)
        } else {
            ".noftz is for sums of 16-bit floats".into()
        }
    })?;
    options(reduce.route, false, reduce.cache_hint)
}

fn store(st: &StAsync) -> Result<(), String> {
    use Type::{B32, B64, F32, F64, S32, S64, U32, U64};
    one_of("st.async", st.ty, &[B32, U32, S32, B64, U64, S64, F32, F64])?;
    ensure(matches!(st.vector, 1 | 2 | 4) && st.bytes() <= 16, || {
        format!("st.async stores up to 16 bytes, not {} .{}", st.vector, st.ty)
    })?;
    cluster("st.async", st.space)
}

fn asynchronous_reduction(red: &RedAsync) -> Result<(), String> {
    use Type::{B32, S32, S64, U32, U64};
    let what = format!("red.async.{}", red.op.name());
    let types: &[Type] = match red.op {
        AtomicOp::And | AtomicOp::Or | AtomicOp::Xor => &[B32],
        AtomicOp::Add => &[U32, S32, U64, S64],
        AtomicOp::Inc | AtomicOp::Dec => &[U32],
        AtomicOp::Min | AtomicOp::Max => &[U32, S32],
        AtomicOp::Exch | AtomicOp::Cas => return Err(format!("there is no {what}")),
    };
    one_of(&what, red.ty, types)?;
    cluster("red.async", red.space)
}

fn cluster(what: &str, space: Space) -> Result<(), String> {
    ensure(matches!(space, Space::SharedCluster | Space::Generic), || {
        format!("{what} works on .shared::cluster, not on {}", space.suffix())
    })
}
