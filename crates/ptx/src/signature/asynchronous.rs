//! The operands of what works beside the threads: bulk copies, mbarriers, stores to other CTAs, warpgroup products.

use smallvec::smallvec;

use super::{Flow, POLICY, Signature, Slot, SlotKind, atomic_operand, optional, read, value, write};
use crate::{
    BulkCopy, BulkReduce, BulkTensor, BulkTensorReduce, Mbarrier, MbarrierOp, Op, Space, Type, Wgmma,
    WgmmaSource,
};

impl Op {
    /// Destination, source and size, or the box of a tensor map; then what the modifiers announce.
    pub(super) fn bulk(&self) -> Signature {
        let address = |space| read(SlotKind::Address(space));
        let size = read(value(Type::U32));
        let box_of = |dims: u8| -> [Slot; 2] {
            [address(Space::Generic), read(SlotKind::Vector(Type::S32, dims.into()))]
        };
        let mut s = Signature::new();
        let (mut multicast, mut hint) = (false, false);
        match *self {
            Op::CpAsyncBulk(BulkCopy { route, .. }) | Op::CpReduceAsyncBulk(BulkReduce { route, .. }) => {
                s.extend([address(route.destination()), address(route.source()), size]);
                if route.has_mbarrier() {
                    s.push(address(route.destination()));
                }
            }
            Op::CpAsyncBulkTensor(BulkTensor { route, dims, .. }) if route.has_mbarrier() => {
                s.push(address(route.destination()));
                s.extend(box_of(dims));
                s.push(address(route.destination()));
            }
            Op::CpAsyncBulkTensor(BulkTensor { dims, .. })
            | Op::CpReduceAsyncBulkTensor(BulkTensorReduce { dims, .. }) => {
                s.extend(box_of(dims));
                s.push(address(Space::Shared));
            }
            Op::CpAsyncBulkPrefetch { .. } => s.extend([address(Space::Global), size]),
            Op::CpAsyncBulkPrefetchTensor { dims, .. } => s.extend(box_of(dims)),
            _ => {}
        }
        match *self {
            Op::CpAsyncBulk(copy) => (multicast, hint) = (copy.multicast, copy.cache_hint),
            Op::CpAsyncBulkTensor(copy) => (multicast, hint) = (copy.multicast, copy.cache_hint),
            Op::CpReduceAsyncBulk(reduce) => hint = reduce.cache_hint,
            Op::CpReduceAsyncBulkTensor(reduce) => hint = reduce.cache_hint,
            Op::CpAsyncBulkPrefetch { cache_hint } | Op::CpAsyncBulkPrefetchTensor { cache_hint, .. } => {
                hint = cache_hint;
            }
            _ => {}
        }
        s.extend(multicast.then(|| read(value(Type::B16))));
        s.extend(hint.then(|| read(POLICY)));
        s
    }
}

pub(super) fn mbarrier(mbarrier: Mbarrier) -> Signature {
    use MbarrierOp as M;
    let (state, count, pred) = (value(Type::B64), value(Type::U32), value(Type::Pred));
    let bar = SlotKind::Address(mbarrier.space);
    match mbarrier.op {
        M::Init | M::ExpectTx | M::CompleteTx => smallvec![read(bar), read(count)],
        M::Inval => smallvec![read(bar)],
        M::Arrive | M::ArriveDrop => smallvec![write(state), read(bar), optional(count)],
        M::ArriveNoComplete | M::ArriveDropNoComplete | M::ArriveExpectTx | M::ArriveDropExpectTx => {
            smallvec![write(state), read(bar), read(count)]
        }
        M::TestWait => smallvec![write(pred), read(bar), read(state)],
        M::TestWaitParity => smallvec![write(pred), read(bar), read(count)],
        M::TryWait => smallvec![write(pred), read(bar), read(state), optional(count)],
        M::TryWaitParity => smallvec![write(pred), read(bar), read(count), optional(count)],
        M::PendingCount => smallvec![write(value(Type::U32)), read(state)],
    }
}

/// `[dst], value, [mbar]`, all in the shared memory of one CTA of the cluster.
pub(super) fn store(space: Space, ty: Type, vector: u8) -> Signature {
    smallvec![
        read(SlotKind::Address(space)),
        read(atomic_operand(ty, vector)),
        read(SlotKind::Address(space))
    ]
}

/// `{d…}, a, b-desc, scale-d, imm-scale-a, imm-scale-b, imm-trans-a, imm-trans-b`, as far as the types have them.
pub(super) fn product(wgmma: &Wgmma) -> Signature {
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
