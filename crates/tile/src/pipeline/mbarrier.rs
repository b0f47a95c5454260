//! Mbarriers: consumers wait on them for asynchronous copies (full barriers), producers for stages to be
//! released (empty barriers).

use ptx::{Builder, Pointer, R32, Shared};

/// An array of mbarriers in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Mbarriers {
    first: Shared,
}

impl Mbarriers {
    /// Bytes of one mbarrier (PTX ISA, "Size and alignment of mbarrier object").
    pub const BYTES: u32 = 8;

    /// The mbarriers that begin at `first`, a multiple of 8 bytes.
    pub const fn new(first: Shared) -> Mbarriers {
        Mbarriers { first }
    }

    /// The mbarrier at a constant index.
    pub fn at(self, index: u32) -> Shared {
        self.first.at(i64::from(index * Mbarriers::BYTES))
    }

    /// The mbarrier at an index in a register.
    pub fn index(self, k: &mut Builder, index: R32) -> Shared {
        k.shared_index(self.first, index, Mbarriers::BYTES)
    }

    /// The array without its first `count` mbarriers; `count` is in a register.
    pub fn skip(self, k: &mut Builder, count: R32) -> Mbarriers {
        Mbarriers { first: self.index(k, count) }
    }

    /// The array without its first `index` mbarriers.
    #[must_use]
    pub fn from(self, index: u32) -> Mbarriers {
        Mbarriers { first: self.at(index) }
    }
}

/// Pipeline state over a ring of `stages` stages: the stage index and the phase parity. Each stage has an
/// mbarrier that completes one phase per round.
///
/// A consumer starts with [`PipelineState::consumer`]: parity 0, the barrier's first phase. A producer that
/// waits for empty stages starts with [`PipelineState::producer`]: the phase before the first counts as
/// complete (PTX ISA, "mbarrier.test_wait"), so the first round finds every stage empty.
#[derive(Clone, Copy, Debug)]
pub struct PipelineState {
    stages: u32,
    /// The current stage.
    pub stage: R32,
    /// The parity to wait for at this stage.
    pub parity: R32,
}

impl PipelineState {
    /// State of a thread that waits on full barriers.
    pub fn consumer(k: &mut Builder, stages: u32) -> PipelineState {
        PipelineState { stages, stage: k.mov(0), parity: k.mov(0) }
    }

    /// State of a thread that waits on empty barriers.
    pub fn producer(k: &mut Builder, stages: u32) -> PipelineState {
        PipelineState { stages, stage: k.mov(0), parity: k.mov(1) }
    }

    /// Number of stages.
    pub const fn stages(self) -> u32 {
        self.stages
    }

    /// The state with the parity kept and another stage.
    #[must_use]
    pub fn at_stage(self, k: &mut Builder, stage: u32) -> PipelineState {
        PipelineState { stage: k.mov(stage), ..self }
    }

    /// The state with the parity kept and the stage before the current one.
    #[must_use]
    pub fn previous(self, k: &mut Builder) -> PipelineState {
        let stage = match self.stages {
            1 => self.stage,
            2 => k.xor(self.stage, 1),
            stages => {
                let first = k.setp_u(ptx::CmpOp::Eq, self.stage, 0);
                let before = k.sub(self.stage, 1);
                k.selp(stages - 1, before, first)
            }
        };
        PipelineState { stage, ..self }
    }

    /// The address of the current stage, for tiles of `bytes` bytes each from `first` on.
    pub fn place(self, k: &mut Builder, first: Shared, bytes: u32) -> Shared {
        k.shared_index(first, self.stage, bytes)
    }

    /// Moves to the position of `other`, in the same ring.
    pub fn move_to(self, k: &mut Builder, other: PipelineState) {
        k.mov_to(self.stage, other.stage);
        k.mov_to(self.parity, other.parity);
    }

    /// Advances to the next stage.
    pub fn advance(self, k: &mut Builder) {
        match self.stages {
            1 => k.xor_to(self.parity, self.parity, 1),
            2 => {
                // The parity flips at every second step of a two-stage ring: when stage 1 is left.
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
