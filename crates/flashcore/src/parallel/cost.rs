//! The predicted time of each schedule, from bytes, FLOP and constants of the machine.

use std::fmt;

use problem::Element;

use super::heads::lacks;
use super::plan::{BandCall, gather_plan};
use super::stages::stages_of;
use super::{SequenceSplit, ShardSchedule, ShardedAttention};

/// Constants of a machine. All ranks use the same ones, so that all choose alike.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShardCosts {
    /// FLOP a second of a rank's forward pass.
    pub flops: f64,
    /// Bytes a second that a rank receives, while it sends as many.
    pub link: f64,
    /// Bytes a second of a rank's memory.
    pub memory: f64,
    /// Seconds of one exchange and of one kernel, besides bytes and FLOP.
    pub exchange: f64,
    /// Seconds of one kernel, besides FLOP.
    pub kernel: f64,
    /// The time that an exchange beside a kernel takes from the kernel, as a share of the exchange.
    pub overlap_loss: f64,
}

impl ShardCosts {
    /// A CPU core and memory of the process: orders of magnitude.
    pub const THREADS: ShardCosts =
        ShardCosts { flops: 5e10, link: 5e9, memory: 1e10, exchange: 1e-5, kernel: 1e-4, overlap_loss: 1.0 };
    /// H200s of one host. One run of an earlier version measured 740 TFLOP/s, 4.2 TB/s, 232 GB/s of an
    /// all-gather by NCCL, and a loss of 0.6 of a hidden exchange. A kernel's start and end, 130 us, are
    /// fitted to calls from Python on two H200s. The time of an exchange is assumed.
    pub const H200: ShardCosts = ShardCosts {
        flops: 7.4e14,
        link: 2.32e11,
        memory: 4.2e12,
        exchange: 3e-5,
        kernel: 1.3e-4,
        overlap_loss: 0.6,
    };
}

/// The predicted time of the forward pass in one schedule, of the slowest rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduleForecast {
    /// The schedule.
    pub schedule: ShardSchedule,
    /// Bytes that the rank receives.
    pub received: usize,
    /// Seconds in all.
    pub seconds: f64,
    /// Seconds of exchanges that nothing hides.
    pub exposed: f64,
    /// One rank's predicted time for all rows, divided by the ranks, as a share of `seconds`.
    pub efficiency: f64,
}

impl fmt::Display for ScheduleForecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ScheduleForecast { schedule, received, seconds, exposed, efficiency } = self;
        let (megabytes, ms, exposed_ms) = (*received as f64 / 1e6, seconds * 1e3, exposed * 1e3);
        write!(
            f,
            "{schedule:?}: predicted {ms:.3} ms, of which {exposed_ms:.3} ms wait for {megabytes:.1} MB; \
             {efficiency:.2} of ideal"
        )
    }
}

impl<'a, Q: Element, K: Element, V: Element> ShardedAttention<'a, Q, K, V> {
    /// The call with the schedule that is taken.
    pub(super) fn decided(&self) -> ShardedAttention<'a, Q, K, V> {
        let mut decided = self.clone();
        if self.schedule == ShardSchedule::Auto {
            let costs = if self.call.gpu().is_some() { ShardCosts::H200 } else { ShardCosts::THREADS };
            decided.schedule =
                self.explain(&costs).first().map_or(ShardSchedule::AllGather, |best| best.schedule);
        }
        decided
    }

    /// The predicted times of the forward pass, the schedule that [`ShardSchedule::Auto`] takes first. It
    /// does not communicate, and says the same on all ranks.
    ///
    /// ```
    /// use flashcore::parallel::{SequenceSplit, ShardCosts, ShardSchedule};
    /// use flashcore::{Layout, TensorView, attention};
    ///
    /// let split = SequenceSplit::contiguous(&[0, 32768], 2)?;
    /// let x = vec![half::bf16::ZERO; split.rows() * 64]; // one head
    /// let x = TensorView::dense(&x, [1, 1, split.rows(), 64], Layout::Bhsd)?;
    /// let forecasts = attention(x, x, x).window(1023, 0).sharded(&split).explain(&ShardCosts::H200);
    /// assert_eq!(forecasts[0].schedule, ShardSchedule::AllGather); // of the 1023 keys before its rows
    /// assert_eq!(forecasts[0].received, 1023 * 2 * 64 * 2);
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    pub fn explain(&self, costs: &ShardCosts) -> Vec<ScheduleForecast> {
        let [heads, heads_kv] = [self.call.q.shape[1], self.call.k.shape[1]];
        let ranks = self.split.ranks();
        let slices = [2, 4, 8].into_iter().filter(|&slices| heads_kv.is_multiple_of(slices));
        let both = (2..ranks).filter(|&together| ranks.is_multiple_of(together));
        let schedules = [ShardSchedule::AllGather, ShardSchedule::Ring].into_iter();
        let schedules = schedules.chain(slices.map(|slices| ShardSchedule::Sliced { slices }));
        let schedules = schedules.chain(both.map(|together| ShardSchedule::UlyssesRing { together }));
        let possible = schedules.chain([ShardSchedule::Ulysses]).filter(|schedule| {
            let together = schedule.together(ranks);
            heads > 0 && heads_kv > 0 && lacks(heads, heads_kv, together).is_none()
        });
        let mut forecasts: Vec<_> = possible.map(|schedule| self.forecast(schedule, costs)).collect();
        forecasts.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        forecasts
    }

    fn forecast(&self, schedule: ShardSchedule, costs: &ShardCosts) -> ScheduleForecast {
        let of_ranks = (0..self.split.ranks()).map(|rank| self.of_rank(schedule, rank, costs));
        let slowest = of_ranks.max_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let mut slowest = slowest.unwrap_or(ScheduleForecast {
            schedule,
            received: 0,
            seconds: 0.0,
            exposed: 0.0,
            efficiency: 1.0,
        });
        let whole = SequenceSplit { fragments: vec![vec![0..self.split.length()]], ..self.split.clone() };
        let calls = gather_plan(&whole, 0, self.band()).calls;
        let ideal = self.compute(&calls, self.call.q.shape[1], costs) / self.split.ranks() as f64;
        slowest.efficiency = if slowest.seconds > 0.0 { ideal / slowest.seconds } else { 1.0 };
        slowest
    }

    /// Seconds of the FLOP of calls for some query heads.
    fn compute(&self, calls: &[BandCall], heads: usize, costs: &ShardCosts) -> f64 {
        let pairs: usize = calls.iter().map(BandCall::pairs).sum();
        let ([batch, _, _, dim], dim_v) = (self.call.q.shape, self.call.v.shape[3]);
        2.0 * (batch * heads * (dim + dim_v)) as f64 * pairs as f64 / costs.flops
    }

    fn of_rank(&self, schedule: ShardSchedule, rank: usize, costs: &ShardCosts) -> ScheduleForecast {
        let whole = ShardedAttention { schedule, ..self.clone() };
        let heads = whole.heads(rank);
        let work = whole.work(&heads);
        let ([batch, _, rows, dim], dim_v) = (self.call.q.shape, self.call.v.shape[3]);
        let bytes = |rows: usize, heads_kv: usize| {
            rows * batch * heads_kv * (dim * K::DTYPE.bytes() + dim_v * V::DTYPE.bytes())
        };
        let (mut sends, mut computes, mut received, mut busy, mut extra) =
            (Vec::new(), Vec::new(), 0, 0.0, 0.0);
        let stages = stages_of(&work);
        for (i, stage) in stages.iter().enumerate() {
            let away = stage.plan.pieces.iter().filter(|piece| piece.rank != work.rank);
            let away = bytes(away.map(|piece| piece.shard.len()).sum(), stage.heads.len());
            let travels = away > 0 || !stage.sends.is_empty();
            sends.push(if travels { away as f64 / costs.link + costs.exchange } else { 0.0 });
            received += away;
            let queries = work.queries_of(&stage.heads).len();
            let compute = self.compute(&stage.plan.calls, queries, costs);
            computes.push(compute + stage.plan.calls.len() as f64 * costs.kernel);
            let merged: usize = if work.ring && i > 0 {
                stage.plan.calls.iter().map(|call| call.rows().len() * batch * queries * dim_v * 22).sum()
            } else {
                0
            };
            extra += (merged + 2 * bytes(stage.plan.rows, stage.heads.len())) as f64 / costs.memory;
        }
        // While a stage is computed, the next one is received.
        let waits = sends[1..].iter().zip(&computes).map(|(send, compute)| (send - compute).max(0.0));
        let mut exposed = sends[0] + waits.sum::<f64>();
        let hidden = (sends.iter().sum::<f64>() - exposed).max(0.0);
        busy += computes.iter().sum::<f64>();
        let together = schedule.together(self.split.ranks());
        if together > 1 {
            // Q, K and V come with all rows, and O goes back.
            let away = (together - 1) * rows;
            let of_q = batch * work.heads_q.len() * (dim + dim_v) * Q::DTYPE.bytes();
            let moved = away * of_q + bytes(away, work.heads_kv.len());
            received += moved;
            exposed += moved as f64 / costs.link + 2.0 * costs.exchange;
            extra += 4.0 * moved as f64 / costs.memory;
        }
        let seconds = busy + exposed + extra + costs.overlap_loss * hidden;
        ScheduleForecast { schedule, received, seconds, exposed, efficiency: 1.0 }
    }
}
