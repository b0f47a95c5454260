//! A sweep: every plan of a pool is timed, without a search. Its rows are what `kernels::select` predicts
//! from.

use check::genes::{product, values, with_genes};
use evolve::search::vary;
use host::store::append_line;
use kernels::select::{self, TunedTable};
use kernels::{Family, Plan};
use problem::PassKind;
use serde_json::{Value, json};

use super::device::{Candidate, Tensors};
use super::{Error, Search, TURN_US, median};
use crate::with;

/// Time for each plan that races, µs.
const RACE_US: f64 = 15_000.0;
/// Plans that are this many times slower than the fastest in a first trial do not race.
const HOPELESS: f64 = 2.0;

/// Number of swept plans with the shortest predicted times.
const MOST_PREDICTED: usize = 12;
/// For more floating-point operations `mma.sync` is far slower than `wgmma`.
const MOST_MMA_FLOPS: f64 = 1e10;

impl Search<'_> {
    /// Times the plans of the pool, and appends a row for each.
    pub(super) fn sweep(&self) -> Result<String, Error> {
        let (problem, arch) = (self.problem, &self.device.arch);
        let tensors = self.device.tensors(problem, &Family::Mma.default_for(problem, arch)?)?;
        let device = select::Device { name: &self.device.context.info().name, arch: *arch };
        let shipped = select::choose(problem, &device, TunedTable::builtin())?.plan;
        let mut plans = vec![shipped.clone()];
        for family in Family::of_pass(PassKind::Forward) {
            let nearest = select::choose_of(family, problem, &device, TunedTable::builtin());
            plans.extend(nearest.map(|choice| choice.plan));
        }
        if self.args.is_wide {
            plans.extend(select::candidates(problem, &device, TunedTable::builtin()));
            plans.extend(self.variants());
        }
        plans.retain(|plan| {
            plan.family() != Family::Mma.name() || problem.flops() < MOST_MMA_FLOPS || *plan == shipped
        });
        let swept =
            TunedTable::builtin().sweep().map_or_else(Vec::new, |sweep| sweep.predict(problem, &device));
        let nearest = swept.into_iter().take(MOST_PREDICTED);
        plans.extend(nearest.filter_map(|prediction| select::adapted(&prediction.plan, problem, arch)));
        let mut found = Vec::new();
        self.try_all(plans, &tensors, &mut found)?;
        found.retain(|c| c.us.is_finite());
        found.sort_by(|a, b| a.us.total_cmp(&b.us));
        let timed = found.len();
        let most = found.first().ok_or("no candidate")?.us * HOPELESS;
        let raced = found.iter().filter(|c| c.us <= most).count();
        self.race_all(&mut found[..raced], &tensors)?;
        for c in &found {
            let row = json!({
                "suite": "sweep", "impl": "flashcore", "problem": select::Shape::of(problem), "plan": c.plan,
                "us_median": c.us, "registers": c.registers, "raced": c.us <= most, "shipped": c.plan == shipped,
            });
            let row = with(row, self.provenance).to_string();
            append_line(&self.args.folder.join("sweep.jsonl"), &row)?;
        }
        let us = |is: &dyn Fn(&&Candidate) -> bool| {
            found.iter().filter(is).map(|c| c.us).fold(f64::INFINITY, f64::min)
        };
        let (own, best) = (us(&|c| c.plan == shipped), us(&|_| true));
        let words = bench::suites::words(problem);
        Ok(format!("{words}: {timed} timed, {raced} raced, {own:.2} µs shipped, {best:.2} µs fastest"))
    }

    /// Races all plans in turns; their times become the medians.
    fn race_all(&self, found: &mut [Candidate], tensors: &Tensors) -> Result<(), Error> {
        let mut graphs = Vec::new();
        for c in &*found {
            let calls = (TURN_US / c.us).clamp(1.0, 20.0) as u32;
            graphs.push((self.device.graph(c, tensors, calls)?, calls));
        }
        let slowest =
            found.iter().zip(&graphs).map(|(c, (_, calls))| c.us * f64::from(*calls)).fold(0.0, f64::max);
        let rounds = ((RACE_US / slowest) as usize).clamp(5, 60);
        let mut times = vec![Vec::new(); found.len()];
        for round in 0..rounds {
            for i in 0..graphs.len() {
                let i = (i + round) % graphs.len();
                times[i].push(self.device.time(&graphs[i].0, graphs[i].1)?);
            }
        }
        found.iter_mut().zip(&times).for_each(|(c, times)| c.us = median(times));
        Ok(())
    }

    /// The default of each family in other structures, with the heads of a group packed and apart.
    fn variants(&self) -> Vec<Plan> {
        let (problem, arch) = (self.problem, &self.device.arch);
        let mut plans = Vec::new();
        for family in Family::of_pass(PassKind::Forward) {
            let mut default = family.proposal(problem, arch);
            if let Ok(plan) = with_genes(&default, &json!({ "packing": "apart" })) {
                default = plan;
            }
            let mut genes = structures(family);
            if problem.group_size() > 1 && family != Family::Mma {
                genes = product(&[genes, values("packing", ["apart", "packed"])]);
            }
            plans.extend(vary(&default, &genes, problem, arch));
        }
        plans
    }
}

/// The structures of a family: rows of a tile, keys of a block, resident CTAs and divisions of the keys.
fn structures(family: Family) -> Vec<Value> {
    match family {
        Family::Wgmma => {
            let one = values("consumers", [1]);
            let alone = product(&[one.clone(), values("resident_ctas", [1]), values("block_n", [128, 176])]);
            let together = product(&[one, values("resident_ctas", [2, 3]), values("block_n", [64, 128])]);
            let of = |consumers: u32, keys: &[u32], turns: &str| {
                let keys = values("block_n", keys.iter().copied());
                product(&[
                    values("consumers", [consumers]),
                    values("resident_ctas", [1]),
                    keys,
                    values("turns", [turns]),
                ])
            };
            let free = of(2, &[64, 80, 112, 128, 176], "free");
            let in_turn = [of(2, &[80, 128], "ping_pong"), of(3, &[64, 80, 96, 128], "ping_pong")].concat();
            [alone, together, free, in_turn, of(3, &[64, 96], "free")].concat()
        }
        Family::SmallStreamed => {
            let shapes = STREAMS.map(|(rows, cluster, parts, block_n, resident, stages)| {
                json!({
                    "row_warpgroups": rows, "cluster": cluster, "kv_warpgroups": parts, "block_n": block_n,
                    "resident_ctas": resident, "stages": stages, "turns": "free",
                })
            });
            shapes.to_vec()
        }
        Family::SmallAtOnce => {
            let shapes = [(1, 1), (2, 1), (4, 1), (2, 2)].map(
                |(cluster, parts)| json!({ "cluster": cluster, "kv_warpgroups": parts, "row_warpgroups": 1 }),
            );
            let pieces = json!({ "key_copies": 1, "qk_pieces": 1, "softmax_steps": 1, "pv_pieces": 2 });
            product(&[shapes.to_vec(), values("block_n", [64, 128, 256]), vec![pieces]])
        }
        Family::Mma => {
            let tiles = TILES.map(|(block_m, warps, kv_warps, block_n)| {
                json!({
                    "block_m": block_m, "warps": warps, "kv_warps": kv_warps, "block_n": block_n, "splits": 1,
                    "resident_ctas": null,
                })
            });
            let split = TILES[..6].iter().map(|&(block_m, warps, kv_warps, block_n)| {
                json!({ "block_m": block_m, "warps": warps, "kv_warps": kv_warps, "block_n": block_n, "resident_ctas": null })
            });
            let split = product(&[split.collect(), values("splits", [2, 4, 8, 16])]);
            [product(&[tiles.to_vec(), values("stages", [2])]), product(&[split, values("stages", [2])])]
                .concat()
        }
        Family::Decode | Family::BackwardSplit | Family::BackwardFused => Vec::new(),
    }
}

/// Warpgroups of rows, CTAs of a cluster, parts of a CTA's keys, keys of a block, resident CTAs and stages.
const STREAMS: [(u32, u32, u32, u32, u32, u32); 16] = [
    (1, 1, 1, 128, 3, 2),
    (1, 1, 1, 128, 2, 2),
    (1, 1, 1, 64, 4, 2),
    (1, 1, 1, 64, 3, 3),
    (1, 1, 1, 64, 2, 4),
    (1, 1, 2, 128, 1, 2),
    (1, 1, 2, 64, 2, 2),
    (1, 2, 1, 128, 1, 3),
    (1, 2, 1, 128, 2, 2),
    (1, 4, 1, 64, 2, 2),
    (1, 2, 2, 64, 1, 3),
    (2, 1, 1, 128, 1, 2),
    (2, 1, 1, 64, 2, 2),
    (2, 1, 1, 64, 1, 4),
    (2, 2, 1, 64, 1, 3),
    (3, 1, 1, 64, 1, 3),
];

/// Rows, warps, warps that share rows, and keys of a block. The first six are also tried with splits.
const TILES: [(u32, u32, u32, u32); 11] = [
    (16, 4, 4, 128),
    (32, 4, 2, 128),
    (32, 4, 2, 64),
    (64, 4, 1, 64),
    (64, 4, 1, 128),
    (64, 8, 2, 128),
    (16, 8, 8, 256),
    (32, 8, 4, 256),
    (128, 4, 1, 64),
    (128, 8, 1, 64),
    (128, 8, 1, 32),
];
