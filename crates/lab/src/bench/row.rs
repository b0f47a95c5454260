//! One row of `evidence/*.jsonl`.

use problem::Problem;
use serde::Serialize;
use serde_json::{Value, json};

use super::{Measured, Race, quantile};
use crate::provenance::{Provenance, hash};

/// Whether the caches held the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "self-evident")]
pub enum Mode {
    Warm,
    Cold,
}

/// One measured fact with everything needed to judge it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[allow(missing_docs, reason = "the names are the file format's own")]
pub struct Row {
    pub suite: &'static str,
    #[serde(rename = "impl")]
    pub implementation: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<Value>,
    pub problem: Value,
    pub mode: Mode,
    pub us_median: f64,
    pub us_low: f64,
    pub us_high: f64,
    pub samples: Vec<f64>,
    pub tflops: f64,
    pub gbps: f64,
    pub err_max: f64,
    pub err_rel: f64,
    pub ratio_vs: Value,
    pub kernel_hash: String,
    #[serde(flatten)]
    pub provenance: Provenance,
}

/// The problem as rows state it.
pub fn problem_json(problem: &Problem) -> Value {
    json!({
        "batch": problem.batch, "heads_q": problem.heads_q, "heads_kv": problem.heads_kv,
        "seq_q": problem.seq_q, "seq_kv": problem.seq_kv,
        "head_dim": problem.head_dim, "head_dim_v": problem.head_dim_v,
        "dtype": problem.dtype.name(), "mask": problem.mask.name(),
    })
}

impl Race {
    /// The rows of a race: ours, then the peer's.
    pub fn rows(&self, provenance: &Provenance) -> Vec<Row> {
        let plan = serde_json::to_value(self.plan).unwrap_or_default();
        let ratio = self.peer.as_ref().zip(self.comparison.as_ref());
        let ratio = ratio
            .map_or(Value::Null, |(peer, comparison)| json!({ "peer": peer.name, "comparison": comparison }));
        let ours = self.row(&self.ours, Some(plan), ratio, provenance);
        let peer = self.peer.as_ref().map(|peer| self.row(peer, None, Value::Null, provenance));
        std::iter::once(ours).chain(peer).collect()
    }

    fn row(&self, of: &Measured, plan: Option<Value>, ratio_vs: Value, provenance: &Provenance) -> Row {
        let us = of.us();
        let digits = |x: f64| (x * 1000.0).round() / 1000.0;
        Row {
            suite: "cpu",
            implementation: of.name.clone(),
            kernel_hash: hash(plan.as_ref().map_or(of.name.clone(), Value::to_string).as_bytes()),
            plan,
            problem: problem_json(&self.problem),
            mode: Mode::Warm,
            us_median: digits(us),
            us_low: digits(quantile(&of.samples, 0.05)),
            us_high: digits(quantile(&of.samples, 0.95)),
            samples: of.samples.iter().copied().map(digits).collect(),
            tflops: self.problem.flops() / us * 1e-6,
            gbps: self.problem.bytes() / us * 1e-3,
            err_max: of.error.max_abs,
            err_rel: of.error.rel,
            ratio_vs,
            provenance: provenance.clone(),
        }
    }
}
