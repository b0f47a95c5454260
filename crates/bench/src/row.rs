//! One row of `evidence/*.jsonl`.

use problem::Problem;
use serde::Serialize;
use serde_json::{Value, json};

use super::race::{Measurement, Race};
use super::stage::Mode;
use super::statistics::{median, quantile};
use crate::provenance::{Provenance, hash};

/// One measured fact with everything needed to judge it. Missing figures are `null`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub suite: String,
    #[serde(rename = "impl")]
    pub implementation: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<Value>,
    pub problem: Value,
    pub mode: Mode,
    pub us_median: f64,
    pub us_low: f64,
    pub us_high: f64,
    pub samples: usize,
    pub tflops: f64,
    pub gbps: f64,
    pub err_max: f64,
    pub err_rel: f64,
    pub ratio_vs: Value,
    pub kernel_hash: String,
    /// Why the times do not count.
    pub fault: Option<String>,
    /// Calls in one sample. The times are per call.
    pub calls: u32,
    pub rounds: usize,
    pub floor_us: Option<f64>,
    /// Number of outputs that were compared with the oracle; `judged_rows` is the number of rows in each.
    pub looked_at: usize,
    pub judged_rows: usize,
    /// Number of samples taken while the device was throttled.
    pub throttled: usize,
    pub all: All,
    #[serde(flatten)]
    pub provenance: Provenance,
}

/// Every sample in the order of measurement, column by column: two samples per round.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct All {
    pub us: Vec<f64>,
    /// Indices of the samples on new inputs, which no median includes.
    pub fresh: Vec<usize>,
    pub clock_mhz: Option<Vec<u32>>,
    pub watts: Option<Vec<f64>>,
    pub celsius: Option<Vec<u32>>,
    pub throttle: Option<Vec<u64>>,
}

/// The problem as rows state it. `softcap` is there only where the problem has one, `lse` only where the LSE
/// is returned.
pub fn problem_json(problem: &Problem) -> Value {
    let mut row = json!({
        "batch": problem.batch, "heads_q": problem.heads_q, "heads_kv": problem.heads_kv,
        "seq_q": problem.seq_q, "seq_kv": problem.seq_kv,
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v,
        "dtype": problem.dtypes.to_string(), "mask": problem.band.to_string(),
    });
    if let Some(cap) = problem.score.softcap {
        row["softcap"] = json!(cap);
    }
    if problem.pass.lse() {
        row["lse"] = json!(true);
    }
    row
}

/// Identification of a contestant's kernel in its rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Identity {
    /// The plan of a FlashCore kernel.
    pub plan: Option<Value>,
    /// Hash of the kernel's PTX, or of the name and the plan when there is no PTX.
    pub kernel_hash: Option<String>,
}

impl Race {
    /// The rows of a race: one per contestant, with its comparisons. `identities` has one entry per
    /// contestant; missing entries count as empty.
    pub fn rows(&self, suite: &str, identities: &[Identity], provenance: &Provenance) -> Vec<Row> {
        let nothing = Identity::default();
        let rows = self.measurements.iter().enumerate();
        rows.map(|(i, m)| self.row(i, m, suite, identities.get(i).unwrap_or(&nothing), provenance)).collect()
    }

    fn row(
        &self,
        index: usize,
        of: &Measurement,
        suite: &str,
        identity: &Identity,
        provenance: &Provenance,
    ) -> Row {
        let (us, times, all) = (of.us(), of.times(), All::of(of));
        let clocks = all.clock_mhz.iter().flatten().map(|&mhz| f64::from(mhz)).collect::<Vec<_>>();
        let clocks_mhz = if clocks.is_empty() { provenance.clocks_mhz } else { median(&clocks) };
        let named = || hash(format!("{} {:?}", of.name, identity.plan).as_bytes());
        Row {
            suite: suite.to_owned(),
            implementation: of.name.clone(),
            kernel_hash: identity.kernel_hash.clone().unwrap_or_else(named),
            plan: identity.plan.clone(),
            problem: problem_json(&self.problem),
            mode: self.mode,
            us_median: digits(us),
            us_low: digits(quantile(&times, 0.05)),
            us_high: digits(quantile(&times, 0.95)),
            samples: of.samples.len(),
            tflops: self.problem.flops() / us * 1e-6,
            gbps: self.problem.bytes() / us * 1e-3,
            err_max: of.error.map_or(f64::NAN, |e| e.max_abs),
            err_rel: of.error.map_or(f64::NAN, |e| e.rel),
            ratio_vs: if index == 0 { self.ratios() } else { Value::Null },
            fault: of.fault.as_ref().map(ToString::to_string),
            calls: of.calls,
            rounds: self.rounds,
            floor_us: self.floor.map(|floor| digits(floor.us())),
            looked_at: of.looked_at,
            judged_rows: self.judged_rows,
            throttled: of.samples.iter().filter(|s| s.reading.throttled()).count(),
            all,
            provenance: Provenance { clocks_mhz, ..provenance.clone() },
        }
    }

    /// The ratios of the first contestant to the best peer, to every other contestant and to its A/A control.
    fn ratios(&self) -> Value {
        let best = self.best_peer();
        let others = self.measurements.iter().skip(1);
        json!({
            "peer": best.map(|m| &m.name),
            "comparison": best.and_then(|m| m.comparison),
            "control": self.first().comparison,
            "all": others.map(|m| (m.name.clone(), json!(m.comparison))).collect::<serde_json::Map<_, _>>(),
        })
    }
}

impl Row {
    /// The row of a contestant that could not race, with the reason.
    pub fn failed(
        suite: &str,
        name: &str,
        problem: &Problem,
        mode: Mode,
        why: &str,
        provenance: &Provenance,
    ) -> Row {
        Row {
            suite: suite.to_owned(),
            implementation: name.to_owned(),
            plan: None,
            problem: problem_json(problem),
            mode,
            us_median: f64::NAN,
            us_low: f64::NAN,
            us_high: f64::NAN,
            samples: 0,
            tflops: f64::NAN,
            gbps: f64::NAN,
            err_max: f64::NAN,
            err_rel: f64::NAN,
            ratio_vs: Value::Null,
            kernel_hash: hash(name.as_bytes()),
            fault: Some(why.to_owned()),
            calls: 0,
            rounds: 0,
            floor_us: None,
            looked_at: 0,
            judged_rows: 0,
            throttled: 0,
            all: All::default(),
            provenance: provenance.clone(),
        }
    }
}

impl All {
    fn of(measurement: &Measurement) -> All {
        let samples = &measurement.samples;
        let readings = || samples.iter().map(|s| s.reading);
        let fresh = samples.iter().enumerate().filter(|(_, s)| s.fresh).map(|(i, _)| i).collect();
        All {
            us: samples.iter().map(|s| digits(s.us)).collect(),
            fresh,
            clock_mhz: readings().map(|r| r.clock_mhz).collect(),
            watts: readings().map(|r| r.watts.map(digits)).collect(),
            celsius: readings().map(|r| r.celsius).collect(),
            throttle: readings().map(|r| r.throttle).collect(),
        }
    }
}

/// Rounds to three decimals: times to nanoseconds, power to milliwatts.
fn digits(x: f64) -> f64 {
    (x * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpu::CpuPlan;
    use problem::DType;

    #[test]
    fn a_row_has_everything_in_it() {
        let problem = Problem::new(1, 2, 64, 32, DType::F32);
        let race = crate::race_cpu(&problem, &CpuPlan::for_problem(&problem), None, 0.0).unwrap();
        let provenance = Provenance::of_cpu(std::path::Path::new(env!("CARGO_MANIFEST_DIR")), 2);
        let plan = Identity { plan: Some(json!({ "threads": 2 })), kernel_hash: None };
        let row = serde_json::to_value(&race.rows("cpu", &[plan], &provenance)[0]).unwrap();
        for key in [
            "suite",
            "impl",
            "plan",
            "problem",
            "mode",
            "us_median",
            "us_low",
            "us_high",
            "samples",
            "tflops",
            "gbps",
            "err_max",
            "err_rel",
            "ratio_vs",
            "device",
            "driver",
            "clocks_mhz",
            "compiler",
            "kernel_hash",
            "commit",
            "run",
            "when",
        ] {
            assert!(row.get(key).is_some(), "{key} is missing");
        }
        assert_eq!(row["all"]["us"].as_array().unwrap().len() as u64, row["samples"].as_u64().unwrap());
        assert!(row["us_median"].as_f64().unwrap() > 0.0);
        let failed = Row::failed("mission", "fa3", &problem, Mode::Warm, "no module named fa3", &provenance);
        let failed = serde_json::to_value(failed).unwrap();
        assert!(failed["us_median"].is_null() && failed["fault"] == "no module named fa3");
    }
}
