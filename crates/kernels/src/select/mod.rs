//! Chooses the plan for a problem on a device. A problem that has a row in the tuned table gets the plan of
//! the row. Another problem gets the swept plan with the shortest predicted time ([`Sweep`]), or where
//! problems of its kind were not swept, the plan of the nearest row (measured rows before predicted ones), or
//! the default plan. [`choose`] reports its reasons. A caller can also pass its own [`Plan`].

mod correction;
mod distance;
mod model;
mod shipped;
mod structure;
mod sweep;
mod table;

pub use problem::Shape;
pub use sweep::{
    HeldBack, Prediction, Sweep, SweepError, SweepLine, SweptPlans, SweptTimes, adapted, packings,
};
pub use table::{Fault, Kind, TableError, TunedRow, TunedTable};

use std::cmp::Ordering;
use std::collections::HashSet;

use problem::{Problem, Score};
use serde::Serialize;

use crate::{Arch, Family, KernelError, Plan, PlanError};

/// The device for which a plan is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device<'a> {
    /// The device's name: as the driver reports it, or a short form.
    pub name: &'a str,
    pub arch: Arch,
}

/// The source of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "source", rename_all = "lowercase")]
pub enum Source {
    /// A row measured on a device.
    Tuned {
        /// The row.
        row: Box<TunedRow>,
        /// Distance to the problem: 0 for the problem itself.
        distance: f64,
    },
    /// A row predicted by the time model.
    Predicted {
        /// The row.
        row: Box<TunedRow>,
        /// Distance to the problem.
        distance: f64,
    },
    /// A swept plan.
    Swept {
        /// Its predicted time, µs.
        us: f64,
    },
    /// No row was near.
    Default,
}

/// A plan, with the reason for the choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// The plan; it passes [`Plan::check`].
    pub plan: Plan,
    #[serde(flatten)]
    pub source: Source,
    /// The rows and plans that were considered, in order, as sentences.
    pub why: Vec<String>,
}

/// Number of rows listed in [`Choice::why`].
const NEIGHBOURS: usize = 4;
/// A row at most this far away is a row of the problem: on a device of another name, or in the other 16-bit
/// type.
const OWN: f64 = 0.25;

/// The plan for a problem.
///
/// # Errors
/// When the problem is invalid, or no family supports it.
pub fn choose(problem: &Problem, device: &Device, table: &TunedTable) -> Result<Choice, KernelError> {
    from(table, Plan::default_for(problem, &device.arch)?, &problem.canonical(), device)
}

/// Like [`choose`], among the plans of one family.
///
/// # Errors
///
/// When the problem is invalid, or the family does not support it.
pub fn choose_of(
    family: Family,
    problem: &Problem,
    device: &Device,
    table: &TunedTable,
) -> Result<Choice, KernelError> {
    from(&table.of(family), family.default_for(problem, &device.arch)?, &problem.canonical(), device)
}

/// The plans of all rows of the problem's architecture and head dims, the swept plans, and the default of
/// each family, adapted to the problem, each once: the plans that a sweep measures.
pub fn candidates(problem: &Problem, device: &Device, table: &TunedTable) -> Vec<Plan> {
    let problem = &*problem.canonical();
    let dims = (problem.head_dim, problem.head_dim_v);
    let of_pass = |row: &&TunedRow| row.plan.pass() == problem.pass.kind();
    let alike =
        |row: &&TunedRow| row.sm == device.arch.sm && (row.problem.head_dim, row.problem.head_dim_v) == dims;
    let rows = table.rows().iter().filter(of_pass).filter(alike);
    let adapted = rows.filter_map(|row| adapt(row, problem, &device.arch).ok());
    let swept = table.sweep().map_or_else(Vec::new, |sweep| sweep.predict(problem, device));
    let swept = swept.into_iter().map(|prediction| prediction.plan.adapted(problem, &device.arch, true));
    let families = Family::of_pass(problem.pass.kind());
    let defaults = families.filter_map(|family| family.default_for(problem, &device.arch).ok());
    let mut seen = HashSet::new();
    let all = adapted.chain(swept.filter(|plan| plan.check(problem, &device.arch).is_ok())).chain(defaults);
    all.filter(|plan| seen.insert(plan.clone())).collect()
}

/// The plan of the nearest row, or the default plan.
fn from(
    table: &TunedTable,
    default: Plan,
    problem: &Problem,
    device: &Device,
) -> Result<Choice, KernelError> {
    if problem.pass.invariant().is_some() {
        let why = vec!["chosen: the plan whose sums depend on no batch and no number of SMs".to_owned()];
        return Ok(Choice { plan: default, source: Source::Default, why });
    }
    if !problem.programs.is_empty() || problem.storage.pages().is_some() {
        let why =
            vec!["chosen: the family's default, because rows state no programs and no pages".to_owned()];
        return Ok(Choice { plan: default, source: Source::Default, why });
    }
    let mut why = Vec::new();
    for kind in [Kind::Measured, Kind::Predicted] {
        let near = neighbours(problem, device, table, kind);
        if near.first().is_none_or(|(distance, _)| *distance > OWN)
            && let Some(choice) = predicted(table, &near, problem, device)
        {
            return Ok(choice);
        }
        if near.is_empty() {
            why.push(format!("no {} row is near", name(kind)));
            continue;
        }
        let mut found: Option<(f64, &TunedRow, Plan)> = None;
        for (index, &(distance, row)) in near.iter().enumerate() {
            if index >= NEIGHBOURS && found.is_some() {
                break;
            }
            let adapted = if found.is_none() { Some(adapt(row, problem, &device.arch)) } else { None };
            let outcome = match (&adapted, &found) {
                (Some(Ok(_)), _) => "chosen".to_owned(),
                (Some(Err(error)), _) => format!("rejected: {error}"),
                (None, Some((nearest, taken, _))) if distance <= *nearest => {
                    if row.us < taken.us { "rejected: another size" } else { "rejected: slower" }.to_owned()
                }
                (None, _) => "rejected: less similar problem".to_owned(),
            };
            why.push(describe(kind, distance, row, problem, &outcome));
            if let Some(Ok(plan)) = adapted {
                found = Some((distance, row, plan));
            }
        }
        if let Some((distance, row, plan)) = found {
            let row = Box::new(row.clone());
            let source = match kind {
                Kind::Measured => Source::Tuned { row, distance },
                Kind::Predicted => Source::Predicted { row, distance },
            };
            return Ok(Choice { plan, source, why });
        }
    }
    why.push(match &default {
        Plan::Mma(plan) if plan.splits > 1 => format!(
            "chosen: the family's default, which divides the keys of each row block over {} CTAs: rows are \
             few and keys many",
            plan.splits
        ),
        _ => "chosen: the family's default".to_owned(),
    });
    Ok(Choice { plan: default, source: Source::Default, why })
}

/// A plan with its predicted time, µs; of a row, also its distance and the row.
struct Rival<'t> {
    us: f64,
    plan: Plan,
    row: Option<(f64, &'t TunedRow)>,
}

/// The predicted time of a row's plan counts as this much shorter: of plans that are predicted alike, the one
/// that was the fastest on a similar problem. A sixteenth of the error of predicted times, 8 %.
const MEASURED: f64 = 0.995;

/// Of the swept plans and the plans of the nearest rows, the one with the shortest predicted time that the
/// problem allows.
fn predicted(
    table: &TunedTable,
    near: &[(f64, &TunedRow)],
    problem: &Problem,
    device: &Device,
) -> Option<Choice> {
    let predictor = table.sweep()?.predictor(problem, device)?;
    let swept = predictor.swept();
    let rival = |us, plan, row| Rival { us, plan, row };
    let mut all: Vec<Rival> = swept.into_iter().map(|swept| rival(swept.us, swept.plan, None)).collect();
    let rows = near
        .iter()
        .filter_map(|&(distance, row)| Some((distance, row, adapt(row, problem, &device.arch).ok()?)));
    for (distance, row, plan) in rows.take(NEIGHBOURS) {
        if let Some(us) = predictor.us(&plan) {
            all.push(rival(us, plan, Some((distance, row))));
        }
    }
    let counted = |rival: &Rival| if rival.row.is_some() { rival.us * MEASURED } else { rival.us };
    all.sort_by(|a, b| counted(a).total_cmp(&counted(b)));
    let mut why = Vec::new();
    for Rival { us, plan, row } in all {
        let plan = plan.adapted(problem, &device.arch, true);
        let outcome = plan.check(problem, &device.arch);
        let word =
            outcome.as_ref().map_or_else(|error| format!("rejected: {error}"), |()| "chosen".to_owned());
        let family = plan.family();
        let (origin, source) = match row {
            None => ("a swept plan".to_owned(), Source::Swept { us }),
            Some((distance, row)) => (
                format!("the plan of a row at distance {distance:.2}"),
                Source::Tuned { row: Box::new(row.clone()), distance },
            ),
        };
        why.push(format!("{word}: {origin}, of family {family}, {us:.2} µs predicted"));
        if outcome.is_ok() {
            return Some(Choice { plan, source, why });
        }
    }
    None
}

/// Rows of a kind within reach, nearest first. Rows at equal distance are ordered by the distance in size,
/// then by time: times of problems of different sizes are not comparable.
fn neighbours<'t>(
    problem: &Problem,
    device: &Device,
    table: &'t TunedTable,
    kind: Kind,
) -> Vec<(f64, &'t TunedRow)> {
    let shape = Shape::of(problem);
    let pass = problem.pass.kind();
    let rows = table.rows().iter().filter(|row| row.kind == kind && row.plan.pass() == pass);
    let apart = rows.filter_map(|row| Some((distance::distance(row, &shape, device)?, row)));
    let mut near: Vec<_> = apart.filter(|&(distance, _)| distance <= distance::FARTHEST).collect();
    let key =
        |&(distance, row): &(f64, &TunedRow)| [distance, distance::sizes_apart(&row.problem, &shape), row.us];
    near.sort_by(|a, b| {
        let of_each = key(a).into_iter().zip(key(b));
        of_each.fold(Ordering::Equal, |order, (a, b)| order.then(a.total_cmp(&b)))
    });
    near
}

/// The row's genes, adapted where the problem's strides or lengths do not allow them. For another shape, the
/// genes that fill tiles with queries are adapted too.
fn adapt(row: &TunedRow, problem: &Problem, arch: &Arch) -> Result<Plan, PlanError> {
    let plan = row.plan.clone().adapted(problem, arch, row.problem == Shape::of(problem));
    plan.check(problem, arch).map(|()| plan)
}

/// The features of a problem that no row states, in words.
fn unstated(problem: &Problem) -> String {
    let of_heads = Score::OPERANDS.map(|operand| (operand.name(), problem.score.has(operand)));
    let others = [("LSE", problem.pass.lse()), ("lengths", !problem.lengths.is_even())];
    let features = [("softcap", problem.score.softcap.is_some())].into_iter().chain(of_heads).chain(others);
    features.filter(|(_, has)| *has).map(|(name, _)| name).collect::<Vec<_>>().join(", ")
}

fn describe(kind: Kind, distance: f64, row: &TunedRow, problem: &Problem, outcome: &str) -> String {
    let s = &row.problem;
    let zero = match unstated(problem).as_str() {
        "" => "this problem".to_owned(),
        features => format!("this problem, but rows are without {features}"),
    };
    format!(
        "{outcome}: {} on {}, batch {} heads {}/{} seq {}×{} dim {}/{} {} mask {}, {:.2} µs; distance \
         {distance:.2} (0: {zero})",
        name(kind),
        row.device,
        s.batch,
        s.heads_q,
        s.heads_kv,
        s.seq_q,
        s.seq_kv,
        s.head_dim,
        s.head_dim_v,
        s.dtypes,
        s.mask,
        row.us,
    )
}

const fn name(kind: Kind) -> &'static str {
    match kind {
        Kind::Measured => "measured",
        Kind::Predicted => "predicted",
    }
}

#[cfg(test)]
mod tests {
    use attend::{Rescale, Tanh};
    use problem::{Band, DType, Layout, PassKind};
    use serde_json::json;

    use super::*;
    use crate::forward::wgmma::{Rescaling, WgmmaPlan};

    const H200: Device = Device { name: "NVIDIA H200", arch: Arch::SM_90 };

    /// A measured row with the default `mma` plan.
    pub(super) fn row(problem: Problem) -> TunedRow {
        TunedRow {
            device: "NVIDIA H200".to_owned(),
            sm: 90,
            multiprocessors: 132,
            plan: Family::Mma.default_for(&problem, &Arch::SM_90).unwrap(),
            problem: Shape::of(&problem),
            us: 10.0,
            kind: Kind::Measured,
            driver: "CUDA 13.0".to_owned(),
            commit: "0".to_owned(),
            run: "0".to_owned(),
            when: "2026-01-01T00:00:00Z".to_owned(),
        }
    }

    fn table(rows: Vec<TunedRow>) -> TunedTable {
        let text: Vec<String> = rows.iter().map(|row| serde_json::to_string(row).unwrap()).collect();
        TunedTable::parse(&text.join("\n")).unwrap()
    }

    /// A row whose plan differs from the default in its keys per block.
    fn marked(problem: Problem, block_n: u32, us: f64) -> TunedRow {
        let mut row = row(problem);
        if let Plan::Mma(plan) = &mut row.plan {
            (plan.block_n, plan.stages, plan.resident_ctas) = (block_n, 1, None);
            (plan.block_m, plan.kv_warps, plan.products) = (64, 1, attend::Order::InTurn);
        }
        row.us = us;
        row
    }

    fn block_n(choice: &Choice) -> u32 {
        match &choice.plan {
            Plan::Mma(plan) => plan.block_n,
            _ => 0,
        }
    }

    #[test]
    fn without_rows_the_default_is_taken() {
        let mission = Problem::mission();
        let choice = choose(&mission, &H200, &TunedTable::default()).unwrap();
        assert_eq!(choice.source, Source::Default);
        assert_eq!(choice.plan, Plan::default_for(&mission, &Arch::SM_90).unwrap());
        assert!(choice.why.last().unwrap().contains("default"), "{:?}", choice.why);
    }

    /// A plan that was tuned in bf16 is used in f16, with genes limited to the range of f16.
    #[test]
    fn a_guess_beyond_f16_is_taken_within_it() {
        let problem = |dtype| Problem::new(4, 16, 4096, 128, dtype);
        let mut row = row(problem(DType::Bf16));
        let guess = |limit| Rescaling::Speculative { beyond: 8, limit };
        let mut plan = WgmmaPlan::default_for(&problem(DType::Bf16), &Arch::SM_90);
        plan.rescale = guess(40);
        row.plan = Plan::Wgmma(plan);
        for (dtype, limit) in [(DType::Bf16, 40), (DType::F16, 15)] {
            let choice = choose(&problem(dtype), &H200, &table(vec![row.clone()])).unwrap();
            let Plan::Wgmma(plan) = choice.plan else { panic!("{:?}", choice.why) };
            assert_eq!(plan.rescale, guess(limit));
        }
    }

    /// A row is measured without the LSE. For a problem with the LSE, lanes compute the sums, and nothing
    /// else changes.
    #[test]
    fn a_row_also_stands_for_the_problem_with_the_lse() {
        let problem = Problem::new(4, 16, 4096, 64, DType::Bf16);
        let mut row = row(problem.clone());
        row.plan = Family::Wgmma.default_for(&problem, &Arch::SM_90).unwrap();
        let genes = |lse| {
            let problem = problem.clone().with_lse(lse);
            let choice = choose(&problem, &H200, &table(vec![row.clone()])).unwrap();
            assert!(matches!(choice.source, Source::Tuned { .. }), "{:?}", choice.why);
            json!(choice.plan)
        };
        let (mut without, with) = (genes(false), genes(true));
        assert_eq!((&without["sums"], &with["sums"]), (&json!("product"), &json!("lanes")));
        without["sums"] = json!("lanes");
        assert_eq!(without, with);
    }

    /// Lines of tables and ledgers that state `lse` in the plan are read, and the gene is ignored.
    #[test]
    fn plans_that_state_the_lse_are_read() {
        for family in Family::of_pass(PassKind::Forward) {
            let plan = family.default_for(&Problem::mission(), &Arch::SM_90).unwrap();
            let mut stored = json!(plan);
            assert_eq!(stored.get("lse"), None);
            stored["lse"] = json!(false);
            assert_eq!(serde_json::from_value::<Plan>(stored).unwrap(), plan);
        }
    }

    /// A plan tuned in bf16 is used in f16, with its threshold limited to the range of f16.
    #[test]
    fn a_threshold_beyond_f16_is_taken_within_it() {
        let problem = |dtype| Problem::new(1, 8, 512, 64, dtype);
        let mut row = row(problem(DType::Bf16));
        let Plan::Mma(plan) = &mut row.plan else { panic!("the default is of the family") };
        plan.rescale = Rescale::Beyond(14);
        for (dtype, threshold) in [(DType::Bf16, 14), (DType::F16, 8)] {
            let choice = choose(&problem(dtype), &H200, &table(vec![row.clone()])).unwrap();
            let Plan::Mma(plan) = choice.plan else { panic!("{:?}", choice.why) };
            assert_eq!(plan.rescale, Rescale::Beyond(threshold));
        }
    }

    /// No row of the table was measured with a softcap, so the plan takes the default instructions for it.
    #[test]
    fn a_row_without_a_softcap_leaves_its_instructions_to_the_default() {
        let tuned = Problem::new(1, 8, 512, 64, DType::Bf16);
        let table = table(vec![row(tuned.clone())]);
        let capped = tuned.with_softcap(50.0);
        let choice = choose(&capped, &H200, &table).unwrap();
        assert!(matches!(choice.source, Source::Tuned { .. }));
        let Plan::Mma(plan) = choice.plan else { panic!("{:?}", choice.plan) };
        assert_eq!(plan.tanh, Tanh::Approx);
    }

    /// Of plans whose predicted times differ by less than a thousandth, a swept one took 3.7 s on an H200,
    /// and that of a row 3.0.
    #[test]
    fn a_row_comes_before_a_swept_plan_that_is_predicted_alike() {
        let long = Problem::new(1, 32, 1 << 19, 128, DType::Bf16).with_heads_kv(8, Layout::Bhsd);
        let choice = choose(&long.with_band(Band::CAUSAL), &H200, TunedTable::builtin()).unwrap();
        assert!(matches!(choice.source, Source::Tuned { .. }), "{:?}", choice.why);
    }

    #[test]
    fn each_cta_of_a_cluster_has_keys() {
        for (keys, expected) in [(1, 1), (64, 1), (512, 2)] {
            let problem = Problem::new(1, 8, 512, 64, DType::F16).with_seq_kv(keys, Layout::Bhsd);
            let choice = choose(&problem, &H200, TunedTable::builtin()).unwrap();
            let genes = json!(choice.plan);
            assert_eq!(genes["cluster"], expected, "{keys}: {genes}");
        }
    }

    #[test]
    fn tiles_are_filled_with_heads_of_a_group() {
        let grouped = |batch, seq_q, seq_kv| {
            Problem::new(batch, 32, seq_q, 128, DType::Bf16)
                .with_seq_kv(seq_kv, Layout::Bhsd)
                .with_heads_kv(8, Layout::Bhsd)
        };
        for (batch, seq_q, seq_kv) in [(128, 1, 1024), (64, 4, 1024), (256, 1, 512), (8, 24, 1024)] {
            let problem = grouped(batch, seq_q, seq_kv);
            let choice = choose(&problem, &H200, TunedTable::builtin()).unwrap();
            assert_eq!(json!(choice.plan)["packing"], "packed", "{problem:?}: {:?}", choice.why);
        }
        let rows = TunedTable::builtin().with_sweep(None);
        let prompt = choose(&grouped(4, 4096, 4096), &H200, &rows).unwrap();
        assert_eq!(json!(prompt.plan)["packing"], "apart", "{:?}", prompt.why);
    }

    #[test]
    fn the_nearest_and_then_the_fastest_row_is_taken() {
        let at = |seq| Problem::new(1, 8, seq, 64, DType::F16);
        let table =
            table(vec![marked(at(512), 32, 9.0), marked(at(512), 48, 8.0), marked(at(1024), 80, 20.0)]);
        for (seq, expected) in [(512, 48), (600, 48), (1000, 80), (1500, 80)] {
            let choice = choose(&at(seq), &H200, &table).unwrap();
            assert_eq!(block_n(&choice), expected, "{seq}: {:?}", choice.why);
            assert!(matches!(choice.source, Source::Tuned { .. }));
        }
        // Very long problems are at equal distance from each other. Each of them still gets its own row.
        let long = |seq| Problem::new(1, 32, seq, 64, DType::F16);
        let rows =
            vec![marked(long(32768), 32, 16.0), marked(long(8192), 48, 1.0), marked(long(16384), 80, 5.0)];
        let longs = self::table(rows);
        for (seq, expected) in [(8192, 48), (16384, 80), (32768, 32), (65536, 32)] {
            assert_eq!(block_n(&choose(&long(seq), &H200, &longs).unwrap()), expected, "{seq}");
        }
        // The problem has sixteen times the work of any row, so no row is near.
        let choice = choose(&Problem::new(8, 64, 4096, 64, DType::F16), &H200, &table).unwrap();
        assert_eq!(choice.source, Source::Default);
    }

    /// If the problem's strides do not fit a row's stores, only that gene is replaced.
    #[test]
    fn stores_follow_the_strides() {
        for problem in [Problem::mission(), Problem::new(4, 16, 4096, 128, DType::Bf16)] {
            let dense = choose(&problem, &H200, TunedTable::builtin()).unwrap();
            let mut padded = problem.clone();
            let row = padded.out.row + 2;
            (padded.out.row, padded.out.head) = (row, row * problem.seq_q as i64);
            padded.out.batch = padded.out.head * problem.heads_q as i64;
            let choice = choose(&padded, &H200, TunedTable::builtin()).unwrap();
            let genes = |choice: &Choice| {
                let mut genes = serde_json::to_value(&choice.plan).unwrap();
                genes.as_object_mut().unwrap().remove("store").unwrap();
                genes
            };
            assert_eq!(genes(&choice), genes(&dense));
            assert_ne!(choice.plan, dense.plan);
        }
    }

    #[test]
    fn every_tuned_problem_gets_the_fastest_of_its_own_rows() {
        let builtin = TunedTable::builtin();
        let of_h200 =
            |row: &&TunedRow| row.kind == Kind::Measured && distance::same_device(&row.device, "H200");
        for row in builtin.rows().iter().filter(of_h200) {
            let choice = choose(&row.problem.problem(), &H200, builtin).unwrap();
            let Source::Tuned { row: taken, distance } = &choice.source else { panic!("{:?}", choice.why) };
            assert!(taken.problem == row.problem && *distance == 0.0, "{:?}: {:?}", row.problem, choice.why);
            assert!(taken.us <= row.us, "{:?}: {} µs, {:?}", row.problem, row.us, choice.why);
        }
    }

    #[test]
    fn a_reason_names_the_features_that_rows_lack() {
        let why = |problem: &Problem| choose(problem, &H200, TunedTable::builtin()).unwrap().why.join("\n");
        let plain = Problem::mission();
        assert!(why(&plain).contains("distance 0.00 (0: this problem)"), "{}", why(&plain));
        let capped = plain.with_softcap(50.0).with_lse(true);
        let expected = "distance 0.00 (0: this problem, but rows are without softcap, LSE)";
        assert!(why(&capped).contains(expected), "{}", why(&capped));
    }

    #[test]
    fn measured_rows_go_before_predicted_ones() {
        let mission = Problem::mission();
        let predicted = TunedRow { kind: Kind::Predicted, ..marked(mission.clone(), 32, 1.0) };
        let measured = marked(Problem::new(1, 8, 640, 64, DType::F16), 48, 9.0);
        let both = table(vec![predicted.clone(), measured]);
        assert_eq!(block_n(&choose(&mission, &H200, &both).unwrap()), 48);
        let choice = choose(&mission, &H200, &table(vec![predicted])).unwrap();
        assert!(matches!(choice.source, Source::Predicted { distance: 0.0, .. }));
    }

    /// A row is used for problems that its family supports. Other problems use the next row.
    #[test]
    fn what_tensor_maps_cannot_take_goes_to_another_family() {
        let long = Problem::new(4, 16, 2048, 64, DType::Bf16);
        let mut wgmma = row(long.clone());
        wgmma.plan = Family::Wgmma.default_for(&long, &Arch::SM_90).unwrap();
        let wgmma_plan = wgmma.plan.clone();
        let slower = marked(long.clone(), 48, 20.0);
        let table = table(vec![wgmma, slower]);
        let choice = choose(&long, &H200, &table).unwrap();
        assert_eq!(choice.plan, wgmma_plan);
        let mut ragged = long;
        (ragged.k.row, ragged.k.head, ragged.k.batch) = (65, 65 * 2048, 65 * 2048 * 16);
        let choice = choose(&ragged, &H200, &table).unwrap();
        assert_eq!(block_n(&choice), 48, "{:?}", choice.why);
        assert!(choice.why[0].starts_with("rejected: "), "{:?}", choice.why);
        let without_rows = choose(&ragged, &H200, &TunedTable::default()).unwrap();
        assert_eq!(without_rows.plan.family(), "mma");
    }

    #[test]
    fn strides_decide_how_tiles_are_copied() {
        let mission = Problem::mission();
        let mut ragged = mission.clone();
        (ragged.k.row, ragged.k.head) = (65, 65 * 512);
        let choice = choose(&ragged, &H200, &table(vec![marked(mission, 48, 9.0)])).unwrap();
        assert_eq!(block_n(&choice), 48);
        choice.plan.check(&ragged, &Arch::SM_90).unwrap();
    }

    #[test]
    fn a_plan_that_does_not_fit_gives_way_to_the_next() {
        let mission = Problem::mission();
        // A device of the row's architecture with less shared memory.
        let small = Arch { shared_per_cta: 32 * 1024, shared_per_sm: 64 * 1024, ..Arch::SM_90 };
        let (near, far) =
            (marked(mission.clone(), 128, 5.0), marked(Problem::new(1, 8, 640, 64, DType::F16), 32, 9.0));
        let choice = choose(&mission, &Device { arch: small, ..H200 }, &table(vec![near, far])).unwrap();
        assert_eq!(block_n(&choice), 32, "{:?}", choice.why);
        assert!(
            choice.why[0].starts_with("rejected: ") && choice.why[0].contains("shared memory"),
            "{:?}",
            choice.why
        );
    }

    #[test]
    fn every_choice_computes_its_problem() {
        let rows = [64, 128].into_iter().flat_map(|dim| {
            [1usize, 130, 512, 4096].into_iter().flat_map(move |seq| {
                Band::NAMED
                    .into_iter()
                    .map(move |mask| row(Problem::new(1, 8, seq, dim, DType::F16).with_band(mask)))
            })
        });
        let table = table(rows.collect());
        for arch in Arch::ALL {
            for (seq_q, seq_kv, heads_kv) in [(1, 5000, 1), (77, 0, 8), (4096, 4096, 2), (200_000, 3, 4)] {
                for dim in [64, 72, 128, 256] {
                    for mask in Band::NAMED {
                        let mut problem = Problem::new(1, 8, seq_q, dim, DType::Bf16).with_band(mask);
                        (problem.seq_kv, problem.heads_kv) = (seq_kv, heads_kv);
                        let problem = problem.with_layout(Layout::Bshd);
                        let choice = choose(&problem, &Device { name: "any", arch }, &table).unwrap();
                        choice.plan.check(&problem, &arch).unwrap();
                    }
                }
            }
        }
        let f32 = Problem { dtypes: DType::F32.into(), ..Problem::mission() };
        choose(&f32, &H200, &table).unwrap().plan.check(&f32, &H200.arch).unwrap();
        let fp8 = Problem { dtypes: DType::E4m3.into(), ..Problem::mission() };
        choose(&fp8, &H200, &table).unwrap().plan.check(&fp8, &H200.arch).unwrap();
        assert!(choose(&fp8, &Device { name: "any", arch: Arch::SM_80 }, &table).is_err());
    }

    #[test]
    fn a_family_is_chosen_from_its_own_rows() {
        let problem = Problem::new(4, 32, 512, 64, DType::Bf16);
        let hopper = TunedRow {
            plan: Family::Wgmma.default_for(&problem, &Arch::SM_90).unwrap(),
            us: 5.0,
            ..row(problem.clone())
        };
        let table = table(vec![hopper, marked(problem.clone(), 48, 10.0)]);
        let families = |family| choose_of(family, &problem, &H200, &table).unwrap().plan;
        assert_eq!(choose(&problem, &H200, &table).unwrap().plan.family(), "wgmma");
        assert!(matches!(families(Family::Mma), Plan::Mma(plan) if plan.block_n == 48));
        assert_eq!(families(Family::Wgmma).family(), "wgmma");
        // There is no row of the family, so the family's default is used, even if another family suits the
        // grid.
        let family = Family::SmallStreamed;
        assert_eq!(families(family), family.default_for(&problem, &Arch::SM_90).unwrap());
    }
}
