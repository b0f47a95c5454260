//! `tcgen05.commit` and `tcgen05.fence`.

use super::super::Env;
use super::super::access::{Site, addresses};
use super::super::mbarrier::Cause;
use super::super::registers::for_lanes;
use super::super::units::{Arrival, PendingCommit, inside};
use super::super::warp::Warp;
use crate::decode::Inst;
use crate::memory::{RANK_SHIFT, resolve};
use crate::order::{Agent, Clock, Strength, TensorPipe};
use crate::report::Schedule;
use ptx::Space;

impl Env<'_> {
    /// The mbarrier counts one arrival when the products and copies of the lane are complete, which is at
    /// some time before the first unsuccessful wait.
    pub(super) fn tensor_commit(&mut self, warp: &mut Warp, inst: &Inst, multicast: bool, mask: u32) {
        let home = warp.view.home();
        let time = self.tensors.tick();
        let queue = &mut self.tensors.queues[warp.index];
        queue.before = time;
        let epoch = queue.close(TensorPipe::Product);
        let products = home + self.facts.actors.tensor(warp.index, TensorPipe::Product) as Agent;
        for_lanes(mask, |lane| {
            let mut clock = Clock::new(self.facts.actors.total());
            clock.learn(home, products, 1 << lane, epoch);
            let signal = resolve(addresses(&warp.registers, inst)[lane]).1;
            let ranks = if multicast { warp.registers.lane(inst.s[0], lane) as u32 & 0xffff } else { 1 };
            for rank in (0..16).filter(|rank| ranks >> rank & 1 == 1) {
                let mbarrier = if multicast { rank << RANK_SHIFT | inside(signal) } else { signal };
                self.commit_to(warp, inst, lane, mbarrier, clock.clone());
            }
        });
    }

    fn commit_to(&mut self, warp: &Warp, inst: &Inst, lane: usize, mbarrier: u64, clock: Clock) {
        let site = Site { inst, space: Space::SharedCluster, bytes: 8, strength: Strength::Cta };
        if self.shared_offset(warp, &site, lane, mbarrier).is_none()
            || !self.check_made(warp, inst, lane, mbarrier)
        {
            return;
        }
        let commit = PendingCommit { mbarrier, clock, pc: inst.pc, warp: warp.index, lane };
        let now = match self.facts.context.options.schedule {
            Schedule::Late => false,
            Schedule::Early => true,
            Schedule::Random | Schedule::Lagging => rand::Rng::random(&mut self.rng),
        };
        if now && !self.tensors.has_commit(mbarrier) {
            self.land_commit(&commit);
        } else {
            self.tensors.commit(commit);
        }
    }

    /// Completes the products and copies of commits to an mbarrier, or of all.
    pub(in crate::exec) fn land_commits(&mut self, mbarrier: Option<u64>) {
        for commit in self.tensors.take_commits(mbarrier) {
            self.land_commit(&commit);
        }
    }

    fn land_commit(&mut self, commit: &PendingCommit) {
        let inst = &self.facts.context.program.code[commit.pc as usize];
        let cause = Cause { inst, warp: commit.warp, lane: commit.lane };
        self.mbarriers.complete_products(commit.mbarrier, self.facts.home(), &commit.clock);
        let arrival = Arrival { count: 1, dropped: 0, bytes: 0, clocks: None };
        self.arrive_at(cause, commit.mbarrier, &arrival);
    }

    pub(super) fn tensor_fence(&mut self, warp: &mut Warp, after: bool, mask: u32) {
        let time = self.tensors.tick();
        let queue = &mut self.tensors.queues[warp.index];
        if after {
            queue.after = time;
            warp.fences.after_thread_sync(&mut warp.view, (mask, warp.live));
            return;
        }
        queue.before = time;
        let epoch = queue.close(TensorPipe::Product);
        let issued = self.facts.actors.tensor(warp.index, TensorPipe::Issued);
        warp.view.learn(mask, warp.live, (issued, !0), epoch);
        warp.fences.before_thread_sync(&warp.view, mask);
    }
}
