//! The loop over the blocks of rows that a backward kernel streams, in a ring of `cp.async` stages.

use ptx::{Builder, CmpOp, Pointer, R32, Shared};

/// A ring of stages through which all blocks of one or more heads pass: the blocks of the first head in
/// ascending order, then those of the next head.
///
/// A block is requested `stages − 1` visits before its own. Each visit has one CTA barrier: the barrier makes
/// the block visible and frees the stage that the next request fills.
#[derive(Clone, Copy, Debug)]
pub struct BlockRing {
    room: Shared,
    stages: u32,
    stage_bytes: u32,
    /// The first block of each head, and one past the last.
    from: R32,
    end: R32,
    heads: u32,
    /// The next block to request.
    next: Position,
    /// The block of the current visit, and the offset of its stage.
    current: Position,
    stage: R32,
}

/// A block of a head. At the end, `head` is the number of heads.
#[derive(Clone, Copy, Debug)]
struct Position {
    head: R32,
    block: R32,
}

/// A block of the ring.
#[derive(Clone, Copy, Debug)]
pub struct RingBlock {
    /// The head, counted from the first of the ring.
    pub head: R32,
    /// The index of the block in its head.
    pub block: R32,
    /// The stage that holds the block.
    pub stage: Shared,
}

impl BlockRing {
    /// A ring of at least two `stages` of `stage_bytes` bytes each in `room`, for the blocks `from..end` of
    /// each of `heads` heads. There are no blocks if `end` is not above `from` (signed).
    pub fn new(
        k: &mut Builder,
        room: Shared,
        (stages, stage_bytes): (u32, u32),
        [from, end]: [R32; 2],
        heads: u32,
    ) -> BlockRing {
        let some = k.setp_s(CmpOp::Lt, from, end);
        let mut first = || Position { head: k.selp(0, heads, some), block: k.mov(from) };
        let [next, current] = [first(), first()];
        BlockRing { room, stages, stage_bytes, from, end, heads, next, current, stage: k.mov(0) }
    }

    /// Requests the first blocks. `load` requests the copies of a block into its stage. Copies that the CTA
    /// requested earlier belong to the `cp.async` group of the first block.
    pub fn start(&self, k: &mut Builder, load: &impl Fn(&mut Builder, &RingBlock)) {
        for ahead in 0..self.stages - 1 {
            self.request(k, self.room.at(i64::from(ahead * self.stage_bytes)), load);
        }
    }

    /// Waits until the copies requested before [`BlockRing::start`] are complete and visible.
    pub fn wait_for_first(&self, k: &mut Builder) {
        k.cp_async_wait(self.stages - 2);
        k.bar_sync();
    }

    /// Visits every block.
    pub fn for_each_block(
        &self,
        k: &mut Builder,
        load: &impl Fn(&mut Builder, &RingBlock),
        visit: impl FnOnce(&mut Builder, &RingBlock),
    ) {
        let Position { head, block } = self.current;
        let some = k.setp_u(CmpOp::Lt, head, self.heads);
        k.if_(some, |k| {
            k.do_while(|k| {
                self.wait_for_first(k);
                let freed = self.neighbour(k, self.stages - 1);
                let freed = k.shared_advance(self.room, freed);
                self.request(k, freed, load);
                let stage = k.shared_advance(self.room, self.stage);
                visit(k, &RingBlock { head, block, stage });
                let after = self.neighbour(k, 1);
                k.mov_to(self.stage, after);
                self.advance(k, self.current);
                k.setp_u(CmpOp::Lt, head, self.heads)
            });
        });
    }

    /// Requests the next block, if there is one, as one `cp.async` group.
    fn request(&self, k: &mut Builder, stage: Shared, load: &impl Fn(&mut Builder, &RingBlock)) {
        let Position { head, block } = self.next;
        let exists = k.setp_u(CmpOp::Lt, head, self.heads);
        k.if_(exists, |k| {
            load(k, &RingBlock { head, block, stage });
            self.advance(k, self.next);
        });
        k.cp_async_commit();
    }

    /// Moves to the next block, or to the first block of the next head.
    fn advance(&self, k: &mut Builder, Position { head, block }: Position) {
        k.add_to(block, block, 1);
        let last = k.setp_s(CmpOp::Ge, block, self.end);
        k.selp_to(block, self.from, block, last);
        k.guarded(last, |k| k.add_to(head, head, 1));
    }

    /// The offset of the stage that is `steps` stages after the current one, fewer than there are stages.
    fn neighbour(&self, k: &mut Builder, steps: u32) -> R32 {
        if self.stages == 2 {
            return k.xor(self.stage, self.stage_bytes);
        }
        let all = self.stages * self.stage_bytes;
        let next = k.add(self.stage, steps * self.stage_bytes);
        let wrapped = k.sub(next, all);
        let wraps = k.setp_u(CmpOp::Ge, next, all);
        k.selp(wrapped, next, wraps)
    }
}
