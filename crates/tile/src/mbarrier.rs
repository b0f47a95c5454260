//! Mbarriers: what tells consumers that asynchronous copies have landed, and producers that a place is free
//! again.

use ptx::{Builder, Pointer, R32, Shared};

/// Mbarriers side by side in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Mbarriers {
    first: Shared,
}

impl Mbarriers {
    /// Bytes of one (PTX ISA, "Size and alignment of mbarrier object").
    pub const BYTES: u32 = 8;

    /// Those that begin at `first`, a multiple of 8 bytes.
    pub const fn new(first: Shared) -> Mbarriers {
        Mbarriers { first }
    }

    /// The one of that number.
    pub fn at(self, index: u32) -> Shared {
        self.first.at(i64::from(index * Mbarriers::BYTES))
    }

    /// The one of a number known at run time.
    pub fn index(self, k: &mut Builder, index: R32) -> Shared {
        k.shared_index(self.first, index, Mbarriers::BYTES)
    }

    /// Those from that number on, known at run time.
    pub fn skip(self, k: &mut Builder, count: R32) -> Mbarriers {
        Mbarriers { first: self.index(k, count) }
    }

    /// Those from that number on.
    #[must_use]
    pub fn from(self, index: u32) -> Mbarriers {
        Mbarriers { first: self.at(index) }
    }
}

/// A walk around a ring of `stages` places, each with an mbarrier that completes one phase a round.
///
/// A phase is told by its parity. Who waits for what a round brings begins with [`Ring::consumer`]: parity 0
/// is the barrier's first phase. Who waits until a place is free begins with [`Ring::producer`]: the parity
/// before the first phase counts as complete (PTX ISA, "mbarrier.test_wait"), so that the first round finds
/// every place free.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    stages: u32,
    /// The place now.
    pub stage: R32,
    /// The parity to wait for there.
    pub parity: R32,
}

impl Ring {
    /// Waits for what the round brings.
    pub fn consumer(k: &mut Builder, stages: u32) -> Ring {
        Ring { stages, stage: k.mov(0), parity: k.mov(0) }
    }

    /// Waits for places to be free.
    pub fn producer(k: &mut Builder, stages: u32) -> Ring {
        Ring { stages, stage: k.mov(0), parity: k.mov(1) }
    }

    /// Places.
    pub const fn stages(self) -> u32 {
        self.stages
    }

    /// The same round at another place.
    #[must_use]
    pub fn at_stage(self, k: &mut Builder, stage: u32) -> Ring {
        Ring { stage: k.mov(stage), ..self }
    }

    /// Where the place begins, of tiles of `bytes` bytes side by side from `first` on.
    pub fn place(self, k: &mut Builder, first: Shared, bytes: u32) -> Shared {
        k.shared_index(first, self.stage, bytes)
    }

    /// On to the next place, in place.
    pub fn advance(self, k: &mut Builder) {
        match self.stages {
            1 => k.xor_to(self.parity, self.parity, 1),
            2 => {
                // The parity turns with every second step: when stage 1 is left.
                k.xor_to(self.parity, self.parity, self.stage);
                k.xor_to(self.stage, self.stage, 1);
            }
            stages => {
                k.add_to(self.stage, self.stage, 1);
                let wraps = k.setp_u(ptx::CmpOp::Eq, self.stage, stages);
                k.guarded(wraps, |k| {
                    k.mov_to(self.stage, 0);
                    k.xor_to(self.parity, self.parity, 1);
                });
            }
        }
    }
}
