//! Instructions on mbarrier objects.

use super::{Builder, Pointer, Pred, R32, Shared, SharedPointer, Src};
use crate::{Mbarrier, MbarrierOp, Op, Operand, Scope, Space};

/// The modifiers of an operation on an mbarrier. An arrival at an mbarrier of another CTA releases at cluster
/// scope.
fn on<P: SharedPointer>(op: MbarrierOp) -> Mbarrier {
    let peers = P::SPACE == Space::SharedCluster && op.arrives();
    let scope = if peers { Scope::Cluster } else { Scope::Cta };
    Mbarrier { space: P::SPACE, scope, ..Mbarrier::new(op) }
}

impl Builder {
    /// Initialises an mbarrier whose phases complete after `arrivals` arrivals and all expected bytes.
    pub fn mbarrier_init(&mut self, bar: Shared, arrivals: impl Into<Src<R32>>) {
        let op = Op::Mbarrier(Mbarrier::new(MbarrierOp::Init));
        self.op(op, [Operand::Address(bar.address()), arrivals.into().into()]);
    }

    /// Invalidates an mbarrier, so that its memory may be reused.
    pub fn mbarrier_inval(&mut self, bar: Shared) {
        self.op(Op::Mbarrier(Mbarrier::new(MbarrierOp::Inval)), [Operand::Address(bar.address())]);
    }

    /// Makes initialised mbarriers visible to the cluster (`fence.mbarrier_init.release.cluster`).
    pub fn fence_mbarrier_init(&mut self) {
        self.op(Op::FenceMbarrierInit, []);
    }

    /// Adds `bytes` to the bytes that the current phase expects, without arriving.
    pub fn mbarrier_expect_tx<P: SharedPointer>(&mut self, bar: P, bytes: impl Into<Src<R32>>) {
        let op = Op::Mbarrier(on::<P>(MbarrierOp::ExpectTx));
        self.op(op, [Operand::Address(bar.address()), bytes.into().into()]);
    }

    /// Arrives, and releases the thread's earlier memory accesses to the own CTA.
    pub fn mbarrier_arrive<P: SharedPointer>(&mut self, bar: P) {
        self.arrive(on::<P>(MbarrierOp::Arrive), bar, None);
    }

    /// Adds `bytes` to the bytes that the current phase expects, and arrives.
    pub fn mbarrier_arrive_expect_tx<P: SharedPointer>(&mut self, bar: P, bytes: impl Into<Src<R32>>) {
        self.arrive(on::<P>(MbarrierOp::ArriveExpectTx), bar, Some(bytes.into()));
    }

    fn arrive<P: SharedPointer>(&mut self, mbarrier: Mbarrier, bar: P, bytes: Option<Src<R32>>) {
        let operands = [Operand::Sink, Operand::Address(bar.address())];
        self.op(Op::Mbarrier(mbarrier), operands.into_iter().chain(bytes.map(Operand::from)));
    }

    /// Waits until the phase with this parity has completed.
    pub fn mbarrier_wait_parity(&mut self, bar: Shared, parity: impl Into<Src<R32>>) {
        self.wait_parity(Mbarrier::new(MbarrierOp::TryWaitParity), bar, parity.into());
    }

    /// Like [`Builder::mbarrier_wait_parity`], but also acquires what other CTAs of the cluster released.
    pub fn mbarrier_wait_parity_cluster(&mut self, bar: Shared, parity: impl Into<Src<R32>>) {
        let mbarrier = Mbarrier { scope: Scope::Cluster, ..Mbarrier::new(MbarrierOp::TryWaitParity) };
        self.wait_parity(mbarrier, bar, parity.into());
    }

    fn wait_parity(&mut self, mbarrier: Mbarrier, bar: Shared, parity: Src<R32>) {
        self.do_while(|k| !k.try_wait(mbarrier, bar, parity));
    }

    fn try_wait(&mut self, mbarrier: Mbarrier, bar: Shared, parity: Src<R32>) -> Pred {
        let d = self.reg();
        self.compute::<Pred>(d, Op::Mbarrier(mbarrier), [Operand::Address(bar.address()), parity.into()]);
        d
    }
}
