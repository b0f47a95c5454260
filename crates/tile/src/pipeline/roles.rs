//! Warp specialisation: warpgroup 0 is the producer, the others are consumers.

use ptx::{Builder, CmpOp, Pred, R32, SpecialReg};

use crate::{Pipeline, Threads, WARPGROUP_THREADS};

/// One producer warpgroup and `consumers` consumer warpgroups, with the register split that `setmaxnreg`
/// makes.
#[derive(Clone, Copy, Debug)]
pub struct Roles {
    /// Number of consumer warpgroups.
    pub consumers: u32,
    /// Registers of a producer thread.
    pub producer_registers: u32,
    /// Registers of a consumer thread.
    pub consumer_registers: u32,
}

/// A thread's position among the consumers.
#[derive(Clone, Copy, Debug)]
pub struct Consumer {
    /// Index of the consumer warpgroup, from 0; ptxas knows that it is warp-uniform.
    pub group: R32,
    /// The thread's position. Its rows are those of `row_warp`, and `count` and `row_warp` count the
    /// consumers only. `index` and `warp` include the producer warpgroup, which comes first.
    pub threads: Threads,
    /// The elected lane of each warp, which arrives on mbarriers for the warp.
    pub elected: Pred,
}

impl Consumer {
    /// The position of a consumer if two warpgroups share the rows and divide the columns: the index of the
    /// warpgroup is its [part](Threads::part) of the columns.
    #[must_use]
    pub fn sharing_rows(self, k: &mut Builder) -> Consumer {
        let threads = Threads {
            row_warp: k.and(self.threads.warp, 3),
            kv_warps: 2,
            part: Some(self.group),
            ..self.threads
        };
        Consumer { group: k.mov(0), threads, ..self }
    }
}

impl Roles {
    /// Threads of the CTA.
    pub const fn threads(&self) -> u32 {
        WARPGROUP_THREADS * (1 + self.consumers)
    }

    /// Number of consumer warps.
    pub const fn consumer_warps(&self) -> u32 {
        4 * self.consumers
    }

    /// Initialises the barriers of rings that the producer thread fills and the consumer warps release, and
    /// makes them visible to the CTA and to bulk copies.
    pub fn prepare(&self, k: &mut Builder, pipelines: impl IntoIterator<Item = Pipeline>) {
        let index = k.special(SpecialReg::TidX);
        let first = k.setp_u(CmpOp::Eq, index, 0);
        let mut cluster = None;
        k.if_(first, |k| {
            for pipeline in pipelines {
                pipeline.init(k, self.consumer_warps());
                cluster = cluster.or(pipeline.cluster());
            }
            k.fence_mbarrier_init();
        });
        match cluster {
            None => k.bar_sync(),
            Some(cluster) => cluster.sync_at_start(k),
        }
    }

    /// Runs `produce` in one producer thread and `consume` in all consumer threads, after `setmaxnreg` has
    /// moved registers from the producer to the consumers.
    pub fn split(
        &self,
        k: &mut Builder,
        produce: impl FnOnce(&mut Builder),
        consume: impl FnOnce(&mut Builder, &Consumer),
    ) {
        self.divide(
            k,
            |k, index, _| {
                let first = k.setp_u(CmpOp::Eq, index, 0);
                k.if_(first, produce);
            },
            consume,
        );
    }

    /// Like [`Roles::split`], but runs `produce` in all threads of the producer warpgroup. It takes the
    /// thread's index and that of its warp, which ptxas knows to be uniform.
    pub fn divide(
        &self,
        k: &mut Builder,
        produce: impl FnOnce(&mut Builder, R32, R32),
        consume: impl FnOnce(&mut Builder, &Consumer),
    ) {
        let index = k.special(SpecialReg::TidX);
        let warp = k.warp_index_uniform();
        let warpgroup = k.shr_u(warp, 2);
        let produces = k.setp_u(CmpOp::Eq, warpgroup, 0);
        k.if_else(
            produces,
            |k| {
                k.setmaxnreg_dec(self.producer_registers);
                produce(k, index, warp);
            },
            |k| {
                k.setmaxnreg_inc(self.consumer_registers);
                let consumer = self.consumer(k, index, warp, warpgroup);
                consume(k, &consumer);
            },
        );
    }

    fn consumer(&self, k: &mut Builder, index: R32, warp: R32, warpgroup: R32) -> Consumer {
        let lane = k.and(index, 31);
        let in_quad = k.and(lane, 3);
        let threads = Threads {
            count: WARPGROUP_THREADS * self.consumers,
            index,
            lane,
            warp,
            quad: k.shr_u(lane, 2),
            column: k.shl(in_quad, 1),
            row_warp: k.sub(warp, 4),
            kv_warps: 1,
            part: None,
        };
        Consumer { group: k.sub(warpgroup, 1), threads, elected: k.setp_u(CmpOp::Eq, lane, 0) }
    }
}
