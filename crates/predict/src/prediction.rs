//! The result of a prediction: the time of a kernel, its causes and the utilisation of each unit.

use serde::Serialize;

use crate::resources::Occupancy;

macro_rules! causes {
    ($($variant:ident = $name:literal, $doc:literal;)*) => {
        /// A cause to which time of a warp is assigned.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Cause { $(#[doc = $doc] $variant),* }

        impl Cause {
            /// Every cause.
            pub const ALL: &'static [Cause] = &[$(Cause::$variant),*];

            /// A short name for tables.
            pub const fn name(self) -> &'static str {
                match self { $(Cause::$variant => $name),* }
            }
        }
    };
}

causes! {
    Issue = "issuing", "The warp issues.";
    NotSelected = "issue slots", "The warp could issue, but its scheduler chose another warp.";
    Arithmetic = "arithmetic latency", "Waits for the result of an arithmetic instruction.";
    FmaPipe = "FMA pipe", "The f32 pipe is busy.";
    AluPipe = "ALU pipe", "The integer and logic pipe is busy.";
    HalfPipe = "f16 pipe", "The half-precision and conversion pipe is busy.";
    DoublePipe = "f64 pipe", "The f64 pipe is busy.";
    Mufu = "special functions", "Waits for a special-function result, or for that pipe.";
    TensorPipe = "tensor pipe", "The tensor core is busy.";
    TensorLatency = "tensor latency", "Waits for the result of an mma.";
    SharedLatency = "shared latency", "Waits for the latency of shared memory that is not saturated.";
    SharedBandwidth = "shared bandwidth", "Waits for saturated shared memory: bank conflicts, or too many accesses.";
    Exchange = "shuffles", "Waits for a shuffle.";
    L1 = "L1", "Waits for L1, or for its tags.";
    L2 = "L2 latency", "Waits for L2.";
    L2Bandwidth = "L2 bandwidth", "Waits for L2, whose bandwidth is exhausted.";
    Dram = "DRAM latency", "Waits for DRAM.";
    DramBandwidth = "DRAM bandwidth", "Waits for DRAM, whose bandwidth is exhausted.";
    AsyncCopy = "asynchronous copies", "Waits for groups of cp.async.";
    Mbarrier = "mbarriers", "Waits for a phase of an mbarrier: for bytes of bulk copies, or for other warps.";
    Cluster = "clusters", "Waits for the other CTAs of the cluster.";
    Barrier = "barriers", "Waits at a barrier for other warps.";
    Branch = "branches", "Refills after a branch.";
    Launch = "launch", "Before the first instruction and after the last: the time of an empty kernel.";
}

/// The resource that limits a kernel, which an optimisation should address first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, strum::VariantArray)]
#[serde(rename_all = "snake_case")]
pub enum Bottleneck {
    /// The tensor cores are nearly always busy.
    Tensor,
    /// The f32 pipe is nearly always busy.
    Fma,
    /// The integer and logic pipe is nearly always busy.
    Alu,
    /// The half-precision and conversion pipe is nearly always busy.
    Half,
    /// The f64 pipe is nearly always busy.
    Double,
    /// The special-function pipe is nearly always busy.
    Mufu,
    /// Nearly all issue slots are used.
    Issue,
    /// Shared memory (or the shuffle path) is nearly always busy.
    Shared,
    /// L1 is nearly always busy.
    L1,
    /// L2 bandwidth is nearly exhausted.
    L2,
    /// DRAM bandwidth is nearly exhausted.
    Dram,
    /// No unit is busy: the kernel waits for chains of dependent instructions.
    Latency,
    /// Most warps wait at barriers for a few warps that work.
    Serial,
    /// The kernel takes hardly longer than an empty kernel.
    Launch,
}

impl Bottleneck {
    /// A short name.
    pub const fn name(self) -> &'static str {
        match self {
            Bottleneck::Tensor => "tensor cores",
            Bottleneck::Fma => "f32 pipe",
            Bottleneck::Alu => "integer pipe",
            Bottleneck::Half => "half-precision pipe",
            Bottleneck::Double => "f64 pipe",
            Bottleneck::Mufu => "special functions",
            Bottleneck::Issue => "issue slots",
            Bottleneck::Shared => "shared memory",
            Bottleneck::L1 => "L1",
            Bottleneck::L2 => "L2 bandwidth",
            Bottleneck::Dram => "DRAM bandwidth",
            Bottleneck::Latency => "latency",
            Bottleneck::Serial => "waiting at barriers",
            Bottleneck::Launch => "launch",
        }
    }
}

/// Utilisation of each unit of the SM, from 0 to 1, between the first and the last instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Utilisation {
    pub issue: f64,
    pub fma: f64,
    pub alu: f64,
    pub half: f64,
    pub double: f64,
    pub mufu: f64,
    pub tensor: f64,
    pub shared: f64,
    pub l1: f64,
    pub l2: f64,
    pub dram: f64,
}

impl Utilisation {
    /// The utilisation of the busiest unit.
    #[must_use]
    pub fn busiest(&self) -> f64 {
        let Utilisation { issue, fma, alu, half, double, mufu, tensor, shared, l1, l2, dram } = *self;
        [issue, fma, alu, half, double, mufu, tensor, shared, l1, l2, dram].into_iter().fold(0.0, f64::max)
    }
}

/// A kernel's position under the roofline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Roofline {
    /// Operations of active lanes over the whole grid.
    pub flops: f64,
    /// The part of `flops` on tensor cores.
    pub tensor_flops: f64,
    /// Bytes moved between L2 and the SMs.
    pub l2_bytes: f64,
    /// Bytes moved between DRAM and L2.
    pub dram_bytes: f64,
    /// FLOP per byte of DRAM traffic, or of L2 traffic if there is none from DRAM.
    pub intensity: f64,
    /// Predicted TFLOP/s.
    pub tflops: f64,
    /// TFLOP/s that the roofline allows at this intensity.
    pub roof_tflops: f64,
}

/// The predicted time of a kernel and its breakdown.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Prediction {
    /// The machine's name.
    pub machine: &'static str,
    /// Time of one launch in µs.
    pub us: f64,
    /// Lower end of the uncertainty interval, in µs.
    pub us_low: f64,
    /// Upper end of the uncertainty interval, in µs.
    pub us_high: f64,
    /// The resource that limits the kernel.
    pub bound: Bottleneck,
    /// Fractions of warp time by cause, largest first. They sum to 1. Causes without a share are left out.
    pub split: Vec<(Cause, f64)>,
    /// The share of each instruction, in the module's order, in the time from the first instruction to the
    /// last: its issue, the wait for a unit before it, and the waits for its result. Empty for several
    /// kernels.
    #[serde(skip)]
    pub stalls: Vec<f64>,
    /// Utilisation of the units.
    pub utilisation: Utilisation,
    /// CTAs per SM, and what limits their number.
    pub occupancy: Occupancy,
    /// CTAs of the grid.
    pub ctas: u64,
    /// CTAs that the busiest SM executes, divided by the CTAs it can hold at a time.
    pub waves: f64,
    /// Fraction of the time in which the last, partial wave leaves SMs idle.
    pub tail: f64,
    /// Fraction of the SMs that have work.
    pub active_sms: f64,
    /// Assumed clock in MHz.
    pub clock_mhz: f64,
    /// Clocks from the first instruction to the last.
    pub cycles: f64,
    /// Fraction of the machine's dense mma.sync rate that is reached over the whole time.
    pub tensor_share: f64,
    /// Fraction of the traffic between L1 and L2 that is local memory: spills and private arrays that do not
    /// fit in L1.
    pub local_fraction: f64,
    /// Fraction of the arithmetic that is done on tensor cores.
    pub tensor_fraction: f64,
    /// The roofline point.
    pub roofline: Roofline,
    /// Fraction of the grid's instructions that were replayed. The rest is assumed to run at their mean rate.
    pub replayed: f64,
}

impl Prediction {
    /// The time of kernels that run one after another: times, traffic and operations are sums, shares are
    /// means weighted by time, and occupancy, waves and bound are those of the longest kernel. `None` without
    /// a kernel.
    pub fn in_a_row(steps: &[Prediction]) -> Option<Prediction> {
        let longest = steps.iter().max_by(|a, b| a.us.total_cmp(&b.us))?;
        if steps.len() == 1 {
            return Some(longest.clone());
        }
        let sum = |of: &dyn Fn(&Prediction) -> f64| steps.iter().map(of).sum::<f64>();
        let us = sum(&|p| p.us);
        let mean = |of: &dyn Fn(&Prediction) -> f64| sum(&|p| of(p) * p.us) / us;
        let busy = |of: fn(&Utilisation) -> f64| mean(&|p| of(&p.utilisation));
        let mut split: Vec<(Cause, f64)> = (Cause::ALL.iter())
            .map(|&cause| (cause, mean(&|p| p.share(cause))))
            .filter(|&(_, share)| share > 0.0)
            .collect();
        split.sort_by(|a, b| b.1.total_cmp(&a.1));
        let flops = sum(&|p| p.roofline.flops);
        let (l2_bytes, dram_bytes) = (sum(&|p| p.roofline.l2_bytes), sum(&|p| p.roofline.dram_bytes));
        let traffic = if dram_bytes > 0.0 { dram_bytes } else { l2_bytes };
        Some(Prediction {
            us,
            us_low: sum(&|p| p.us_low),
            us_high: sum(&|p| p.us_high),
            split,
            stalls: Vec::new(),
            utilisation: Utilisation {
                issue: busy(|u| u.issue),
                fma: busy(|u| u.fma),
                alu: busy(|u| u.alu),
                half: busy(|u| u.half),
                double: busy(|u| u.double),
                mufu: busy(|u| u.mufu),
                tensor: busy(|u| u.tensor),
                shared: busy(|u| u.shared),
                l1: busy(|u| u.l1),
                l2: busy(|u| u.l2),
                dram: busy(|u| u.dram),
            },
            cycles: sum(&|p| p.cycles),
            tensor_share: mean(&|p| p.tensor_share),
            local_fraction: mean(&|p| p.local_fraction),
            tensor_fraction: mean(&|p| p.tensor_fraction),
            roofline: Roofline {
                flops,
                tensor_flops: sum(&|p| p.roofline.tensor_flops),
                l2_bytes,
                dram_bytes,
                intensity: flops / traffic.max(1.0),
                tflops: flops / us * 1e-6,
                roof_tflops: longest.roofline.roof_tflops,
            },
            replayed: mean(&|p| p.replayed),
            ..longest.clone()
        })
    }

    /// The fraction of a cause in `split`; 0 if the cause has none.
    pub fn share(&self, cause: Cause) -> f64 {
        self.split.iter().find(|(c, _)| *c == cause).map_or(0.0, |(_, share)| *share)
    }
}
