//! Chooses CTAs for a check with a time budget: which CTAs represent the grid, and how many of them the time
//! allows.
//!
//! If the CTAs of a kernel do not communicate, they run independently, so some of them can represent all. A
//! third of the budget is spent on a search of the grid: each searched CTA runs once, and the emulator
//! reports which instructions it executed and which lines of global memory it shares with others. The rest of
//! the budget is for the runs of the check. Each run has as many of the chosen CTAs as the time allows, in
//! the order of [`Choice`].

use std::collections::{BTreeSet, HashSet};
use std::time::{Duration, Instant};

use emu::{Buffer, EmuError, Footprint, Options};
use ptx::{Dim3, Launch};

use super::feed::Feed;
use super::sample::{Choice, Sample};
use crate::launchfile::Bound;

/// The fraction of the budget for the search of the grid.
const SEARCH: f64 = 1.0 / 3.0;

/// Maximum number of CTAs that are chosen because they executed a new set of instructions, and maximum number
/// of kinds of pairs that share a line.
const KINDS: usize = 32;

/// Maximum number of clusters that are chosen to be spread over the grid.
const SPREAD: usize = 1 << 20;

/// The CTAs of the next run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Next {
    All,
    /// The first CTA of each cluster.
    Some(Vec<u64>),
    /// The remaining budget is too small for another run.
    Stop,
}

/// Chooses CTAs for the runs of a check.
pub(super) struct Sampler {
    grid: Grid,
    started: Instant,
    budget: Duration,
    /// Clusters in the order in which they are chosen.
    order: Vec<(Choice, u64)>,
    /// The estimated seconds that a run takes for each cluster.
    cost: f64,
    searched: BTreeSet<u64>,
    /// Whether the search ended with a hazard. The first run must then show it.
    hazard: bool,
    runs: usize,
    ran: BTreeSet<u64>,
    in_every_run: Option<BTreeSet<u64>>,
    runs_planned: usize,
    all_ctas: Option<&'static str>,
}

impl Sampler {
    /// Starts the budget now.
    ///
    /// # Errors
    /// When the kernel does not fit its contract.
    pub fn new(bound: &Bound, budget: Duration, runs_planned: usize) -> Result<Sampler, EmuError> {
        let several = bound.steps().count() > 1;
        let all_ctas = if several {
            Some("a launch may read what any CTA of the launch before wrote")
        } else if emu::communicates(&bound.kernel, &Options::default())? {
            Some(
                "CTAs may wait for each other, since the kernel has atomics or strong accesses to global memory",
            )
        } else {
            None
        };
        Ok(Sampler {
            grid: Grid::of(&bound.kernel.launch),
            started: Instant::now(),
            budget,
            order: Vec::new(),
            cost: 0.0,
            searched: BTreeSet::new(),
            hazard: false,
            runs: 0,
            ran: BTreeSet::new(),
            in_every_run: None,
            runs_planned,
            all_ctas,
        })
    }

    /// Searches the grid and chooses clusters. A hazard ends the search: then only the clusters among which
    /// it occurred are chosen, so that the first run shows the hazard.
    ///
    /// # Errors
    /// When a run does not end.
    pub fn search(&mut self, bound: &Bound, feed: &Feed, options: &Options) -> Result<(), EmuError> {
        if self.all_ctas.is_some() {
            return Ok(());
        }
        let started = Instant::now();
        let time = self.budget.mul_f64(SEARCH);
        let mut buffers = feed.buffers(bound);
        let positions = self.grid.positions();
        let mut spread = self.grid.spread();
        let mut found = Found::default();
        // The first clusters show how long one cluster takes. Neighbours must be in one batch, so that their
        // common lines are seen.
        let mut batch: Vec<u64> = positions.iter().take(2).map(|(_, cluster)| *cluster).collect();
        let mut next = Some(positions.iter().map(|(_, cluster)| *cluster).collect::<Vec<u64>>());
        while !batch.is_empty() {
            let before = Instant::now();
            let report = self.run(bound, &mut buffers, options, &batch)?;
            if report.hazards.iter().any(|hazard| hazard.fails()) {
                self.order = batch.into_iter().map(|cluster| (Choice::Spread, cluster)).collect();
                self.hazard = true;
                return Ok(());
            }
            self.cost = before.elapsed().as_secs_f64() / batch.len() as f64;
            found.add(&self.grid, report.survey);
            let left = time.saturating_sub(started.elapsed()).as_secs_f64();
            let room = (left / self.cost.max(1e-9)) as usize;
            batch = match next.take() {
                Some(mut positions) => {
                    positions.truncate(room);
                    positions
                }
                // No batch takes more than half of the remaining time.
                None => spread.by_ref().filter(|c| !self.searched.contains(c)).take(room / 2).collect(),
            };
        }
        self.choose(&positions, found);
        Ok(())
    }

    fn run(
        &mut self,
        bound: &Bound,
        buffers: &mut [Buffer],
        options: &Options,
        clusters: &[u64],
    ) -> Result<emu::Report, EmuError> {
        let only = Some(clusters.iter().map(|&cluster| self.grid.cta(cluster)).collect());
        let options = Options { only, survey: true, ..options.clone() };
        let report = emu::run(&bound.kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options)?;
        self.searched.extend(clusters);
        Ok(report)
    }

    /// Puts clusters in order, each once.
    fn choose(&mut self, positions: &[(Choice, u64)], found: Found) {
        let of = |wanted: Choice| positions.iter().copied().filter(move |(choice, _)| *choice == wanted);
        let mut order: Vec<(Choice, u64)> = of(Choice::Corner).collect();
        let corners: HashSet<u64> = order.iter().map(|(_, cluster)| *cluster).collect();
        let paths = found.paths(&corners);
        order.extend(paths.iter().map(|&cluster| (Choice::Instructions, cluster)));
        order.extend(of(Choice::Neighbour));
        order.extend(paths.iter().filter_map(|&c| Some((Choice::Neighbour, self.grid.beside(c)?))));
        order.extend(found.lines.iter().flat_map(|&(_, (a, b))| [a, b].map(|c| (Choice::SharedLine, c))));
        order.extend(of(Choice::Middle));
        order.extend(self.grid.spread().take(SPREAD).map(|cluster| (Choice::Spread, cluster)));
        let mut known = HashSet::new();
        order.retain(|(_, cluster)| known.insert(*cluster));
        self.order = order;
    }

    /// The CTAs of the next of `left` runs.
    pub fn next(&mut self, left: usize) -> Next {
        let first = self.runs == 0;
        let seconds = self.budget.saturating_sub(self.started.elapsed()).as_secs_f64();
        let clusters = self.grid.count() as f64;
        if self.all_ctas.is_some() {
            return if first || self.cost * clusters <= seconds { Next::All } else { Next::Stop };
        }
        let room = (seconds / left.max(1) as f64 / self.cost.max(1e-9)) as usize;
        // At least two CTAs are needed to show how CTAs interact.
        let least = 2.min(self.order.len());
        if !first && self.cost * least as f64 > seconds {
            return Next::Stop;
        }
        let room = if self.hazard { self.order.len() } else { room.max(least) };
        Next::Some(self.order.iter().take(room).map(|(_, cluster)| self.grid.cta(*cluster)).collect())
    }

    /// Records the time that a run took.
    pub fn note(&mut self, run: &Next, time: Duration) {
        self.runs += 1;
        let Next::Some(ctas) = run else {
            self.cost = time.as_secs_f64() / self.grid.count() as f64;
            return;
        };
        let clusters: BTreeSet<u64> = ctas.iter().map(|&cta| self.grid.cluster_of(cta)).collect();
        self.cost = time.as_secs_f64() / clusters.len().max(1) as f64;
        self.ran.extend(&clusters);
        self.in_every_run = Some(match self.in_every_run.take() {
            Some(before) => before.intersection(&clusters).copied().collect(),
            None => clusters,
        });
    }

    /// The CTAs that ran.
    pub fn sample(&self) -> Sample {
        let all = self.grid.count() * self.grid.ranks();
        let of = |clusters: usize| clusters as u64 * self.grid.ranks();
        let ran = |clusters: usize| match self.all_ctas {
            Some(_) if self.runs > 0 => all,
            _ => of(clusters),
        };
        let mut chosen: Vec<(Choice, Vec<u64>)> = Vec::new();
        for &(choice, cluster) in self.order.iter().filter(|(_, cluster)| self.ran.contains(cluster)) {
            let cta = self.grid.cta(cluster);
            match chosen.iter_mut().find(|(known, _)| *known == choice) {
                Some((_, ctas)) => ctas.push(cta),
                None => chosen.push((choice, vec![cta])),
            }
        }
        Sample {
            seconds: self.budget.as_secs_f64(),
            ctas: all,
            ctas_run: ran(self.ran.len()),
            ctas_in_every_run: ran(self.in_every_run.as_ref().map_or(0, BTreeSet::len)),
            ctas_searched: of(self.searched.len()),
            runs_planned: self.runs_planned,
            all_ctas: self.all_ctas,
            chosen,
        }
    }
}

/// The findings of the search.
#[derive(Default)]
struct Found {
    footprints: Vec<(u64, Vec<u64>)>,
    /// The first pair of clusters for each distance along the axes.
    lines: Vec<([i64; 3], (u64, u64))>,
}

impl Found {
    fn add(&mut self, grid: &Grid, survey: emu::Survey) {
        let of = |Footprint { cta, executed }: Footprint| (grid.cluster_of(cta), executed);
        self.footprints.extend(survey.footprints.into_iter().map(of));
        for (a, b) in survey.neighbours {
            let (a, b) = (grid.cluster_of(a), grid.cluster_of(b));
            let (at, to) = (grid.at(a), grid.at(b));
            let distance = [0, 1, 2].map(|axis| to[axis] as i64 - at[axis] as i64);
            if self.lines.len() < KINDS && self.lines.iter().all(|(known, _)| *known != distance) {
                self.lines.push((distance, (a, b)));
            }
        }
    }

    /// The clusters that add to what the corners executed: first those with an instruction that no earlier
    /// cluster executed, then those with a new set of instructions.
    fn paths(&self, corners: &HashSet<u64>) -> Vec<u64> {
        let mut covered: Vec<u64> = Vec::new();
        let mut sets: HashSet<&[u64]> = HashSet::new();
        for (_, executed) in self.footprints.iter().filter(|(cluster, _)| corners.contains(cluster)) {
            unite(&mut covered, executed);
            sets.insert(executed);
        }
        let mut paths = Vec::new();
        for (cluster, executed) in &self.footprints {
            if unite(&mut covered, executed) {
                sets.insert(executed);
                paths.push(*cluster);
            }
        }
        for (cluster, executed) in &self.footprints {
            if paths.len() < KINDS && sets.insert(executed) {
                paths.push(*cluster);
            }
        }
        paths
    }
}

/// Adds a set of bits to another set. Returns whether the other set grew.
fn unite(covered: &mut Vec<u64>, executed: &[u64]) -> bool {
    covered.resize(covered.len().max(executed.len()), 0);
    let mut grew = false;
    for (all, word) in covered.iter_mut().zip(executed) {
        grew |= word & !*all != 0;
        *all |= word;
    }
    grew
}

/// The clusters of a grid.
#[derive(Clone, Copy, Debug)]
struct Grid {
    /// Clusters along each axis.
    clusters: [u64; 3],
    /// CTAs of a cluster along each axis.
    cluster: [u64; 3],
}

impl Grid {
    fn of(launch: &Launch) -> Grid {
        let extents = |Dim3(x, y, z): Dim3| [x, y, z].map(|extent| u64::from(extent).max(1));
        let (grid, cluster) = (extents(launch.grid), extents(launch.cluster));
        Grid { clusters: [0, 1, 2].map(|axis| (grid[axis] / cluster[axis]).max(1)), cluster }
    }

    fn count(&self) -> u64 {
        self.clusters.iter().product()
    }

    /// CTAs of a cluster.
    fn ranks(&self) -> u64 {
        self.cluster.iter().product()
    }

    fn at(&self, cluster: u64) -> [u64; 3] {
        let [x, y, _] = self.clusters;
        [cluster % x, cluster / x % y, cluster / x / y]
    }

    fn number(&self, [x, y, z]: [u64; 3]) -> u64 {
        x + self.clusters[0] * (y + self.clusters[1] * z)
    }

    /// Linear index of a cluster's first CTA.
    fn cta(&self, cluster: u64) -> u64 {
        let at = self.at(cluster);
        let [x, y, z] = [0, 1, 2].map(|axis| at[axis] * self.cluster[axis]);
        let [gx, gy] = [0, 1].map(|axis| self.clusters[axis] * self.cluster[axis]);
        x + gx * (y + gy * z)
    }

    /// The cluster of a CTA.
    fn cluster_of(&self, cta: u64) -> u64 {
        let [gx, gy] = [0, 1].map(|axis| self.clusters[axis] * self.cluster[axis]);
        let at = [cta % gx, cta / gx % gy, cta / gx / gy];
        self.number([0, 1, 2].map(|axis| at[axis] / self.cluster[axis]))
    }

    /// The clusters whose position on each axis is one of these values.
    fn with(&self, values: impl Fn(u64) -> Vec<u64>) -> Vec<u64> {
        let [x, y, z] = self.clusters.map(values);
        let all = z.iter().flat_map(|&z| {
            let x = &x;
            y.iter().flat_map(move |&y| x.iter().map(move |&x| [x, y, z]))
        });
        all.map(|at| self.number(at)).collect()
    }

    /// Corners, their neighbours and the middles, each cluster once.
    fn positions(&self) -> Vec<(Choice, u64)> {
        let ends = |extent: u64| if extent > 1 { vec![0, extent - 1] } else { vec![0] };
        let thirds = |extent: u64| {
            let mut values = vec![0, extent / 2, extent - 1];
            values.dedup();
            values
        };
        let corners = self.with(ends);
        let mut positions: Vec<(Choice, u64)> = corners.iter().map(|&c| (Choice::Corner, c)).collect();
        for &corner in &corners {
            for (axis, &extent) in self.clusters.iter().enumerate().filter(|(_, extent)| **extent > 2) {
                let mut at = self.at(corner);
                at[axis] = if at[axis] == 0 { 1 } else { extent - 2 };
                positions.push((Choice::Neighbour, self.number(at)));
            }
        }
        positions.extend(self.with(thirds).into_iter().map(|c| (Choice::Middle, c)));
        let mut known = HashSet::new();
        positions.retain(|(_, cluster)| known.insert(*cluster));
        positions
    }

    /// The next cluster along the first axis that has one; at the end of the axis, the previous cluster.
    fn beside(&self, cluster: u64) -> Option<u64> {
        let mut at = self.at(cluster);
        let axis = (0..3).find(|&axis| self.clusters[axis] > 1)?;
        at[axis] = if at[axis] + 1 < self.clusters[axis] { at[axis] + 1 } else { at[axis] - 1 };
        Some(self.number(at))
    }

    /// All clusters, in consecutive pairs. Any number of pairs from the beginning is spread evenly.
    fn spread(&self) -> impl Iterator<Item = u64> + use<> {
        let count = self.count();
        let pairs = spread(count.div_ceil(2));
        pairs.flat_map(|pair| [2 * pair, 2 * pair + 1]).filter(move |cluster| *cluster < count)
    }
}

/// The numbers below `count`, each once. Any number of them from the beginning is spread evenly.
pub(super) fn spread(count: u64) -> impl Iterator<Item = u64> {
    // A step near the golden section of the count, and coprime to the count, visits all numbers.
    let mut step = ((count as f64 * 0.618_033_988_75) as u64).max(1);
    while gcd(step, count) != 1 {
        step += 1;
    }
    (0..count).map(move |i| (u128::from(i) * u128::from(step) % u128::from(count)) as u64)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grid(grid: [u32; 3], cluster: [u32; 3]) -> Grid {
        let [a, b] = [grid, cluster].map(|[x, y, z]| Dim3(x, y, z));
        Grid::of(&Launch { cluster: b, ..Launch::new(a, Dim3(32, 1, 1)) })
    }

    #[test]
    fn positions_are_corners_neighbours_and_middles() {
        let of = |grid: Grid, choice: Choice| -> Vec<u64> {
            grid.positions().into_iter().filter(|(c, _)| *c == choice).map(|(_, cluster)| cluster).collect()
        };
        let line = grid([9, 1, 1], [1, 1, 1]);
        assert_eq!(of(line, Choice::Corner), [0, 8]);
        assert_eq!(of(line, Choice::Neighbour), [1, 7]);
        assert_eq!(of(line, Choice::Middle), [4]);
        let plane = grid([5, 4, 1], [1, 1, 1]);
        assert_eq!(of(plane, Choice::Corner), [0, 4, 15, 19]);
        assert_eq!(of(plane, Choice::Neighbour), [1, 5, 3, 9, 16, 10, 18, 14]);
        assert_eq!(of(plane, Choice::Middle), [2, 12, 17]);
        assert_eq!(grid([1, 1, 1], [1, 1, 1]).positions(), [(Choice::Corner, 0)]);
    }

    #[test]
    fn clusters_are_numbered_as_in_the_emulator() {
        let grid = grid([8, 6, 2], [2, 3, 1]);
        assert_eq!((grid.count(), grid.ranks()), (16, 6));
        for cluster in 0..grid.count() {
            assert_eq!(grid.cluster_of(grid.cta(cluster)), cluster);
        }
        assert_eq!(grid.cta(5), 2 + 8 * 3);
        assert_eq!(grid.cluster_of(3 + 8 * 5), 5);
    }

    #[test]
    fn the_spread_visits_every_cluster_once() {
        for count in [1, 2, 3, 7, 64, 99, 100] {
            let mut all: Vec<u64> = grid([count, 1, 1], [1, 1, 1]).spread().collect();
            all.sort_unstable();
            assert_eq!(all, (0..u64::from(count)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn new_instructions_come_before_new_sets() {
        let found = Found {
            footprints: vec![(0, vec![0b0111]), (4, vec![0b0011]), (5, vec![0b1001]), (6, vec![0b0011])],
            lines: Vec::new(),
        };
        assert_eq!(found.paths(&HashSet::from([0])), [5, 4]);
    }
}
