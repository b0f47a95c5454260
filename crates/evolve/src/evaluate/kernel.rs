//! The part of an evaluation that needs no device: building a kernel, describing it, predicting its time and
//! checking it in the emulator. Every evaluation for a GPU begins with this part.

use kernels::{Arch, Plan};
use predict::resources::{Ptxas, PtxasError, Resources, estimate};
use predict::{Gpu, Prediction};
use problem::{Band, Layout, Problem};
use serde_json::{Value, json};

use super::super::task::{Finding, Stage, reject};
use super::subject;
use bench::provenance::hash;
use check::forecast::{self, ForecastError};
use check::gate::{CheckReport, Settings, bind, check_kernel};
use check::launchfile::Bound;
use check::study::{self, RecordError};
use ledger::Candidate;
use ledger::{CheckFact, Judge, Reason, Rejection, Screening};

/// Number of SMs with which persistent kernels are checked. With so few SMs, each CTA takes several tiles
/// even on a small problem.
const FEW: u32 = 3;
/// Maximum number of hazards that a stored verdict lists.
const HAZARDS: usize = 8;

/// Builds, predicts and checks kernels for one machine without using it.
#[derive(Clone, Debug)]
pub struct Bench {
    /// The machine whose times are predicted.
    pub gpu: &'static Gpu,
    /// The architecture of the kernels.
    pub arch: Arch,
    /// NVIDIA's assembler, if it is present.
    pub ptxas: Option<Ptxas>,
}

pub struct Built {
    /// The kernel with its launch contract.
    pub bound: Bound,
    pub text: String,
    /// Registers and shared memory of each kernel.
    pub resources: Vec<Resources>,
    /// Hash of the machine code, if ptxas assembled it.
    pub sass_hash: Option<String>,
}

impl Bench {
    /// For a machine of the time model's table.
    pub fn of(gpu: &'static Gpu) -> Option<Bench> {
        let arch = Arch { multiprocessors: gpu.sms, ..Arch::of(gpu.sm)? };
        Some(Bench { gpu, arch, ptxas: Ptxas::find().ok() })
    }

    /// The kernel of a candidate with its launch contract for the problem.
    ///
    /// # Errors
    /// The rejection, when there is no such kernel.
    pub fn bound(&self, candidate: &Candidate, problem: &Problem) -> Result<Bound, Rejection> {
        subject::bound(candidate, problem, &self.arch).map_err(|fault| fault.at(Stage::Screen))
    }

    /// Builds the kernel of a candidate, with ptxas if it is present.
    ///
    /// # Errors
    /// The rejection, when the kernel cannot be built.
    pub fn build(&self, candidate: &Candidate, problem: &Problem) -> Result<Built, Rejection> {
        let bound = self.bound(candidate, problem)?;
        let text = bound.kernel.module.to_string();
        let (mut resources, mut sass_hash) = (Vec::new(), None);
        for kernel in bound.steps() {
            let entry = &kernel.entry;
            let assembled =
                self.ptxas.as_ref().map(|ptxas| ptxas.assemble(&text, &forecast::target(&bound), entry));
            let found = match assembled {
                Some(Ok((resources, code))) => {
                    // The machine code of all kernels is in one module.
                    sass_hash = Some(identity(&bound, &code));
                    Some(resources)
                }
                Some(Err(error @ PtxasError::Rejected { .. })) => {
                    return Err(reject(Stage::Screen, Reason::Ptxas, error));
                }
                // Without a working assembler, the resources are estimated and the kernel is not rejected.
                Some(Err(_)) | None => estimate(&kernel.module, entry),
            };
            resources
                .push(found.ok_or_else(|| reject(Stage::Screen, Reason::Emit, "the kernel has no body"))?);
        }
        Ok(Built { bound, text, resources, sass_hash })
    }

    /// Builds and describes a candidate without checking it: properties, predicted time, findings.
    ///
    /// # Errors
    /// The rejection, when the kernel cannot be built or does not end.
    pub fn screen(&self, candidate: &Candidate, problem: &Problem) -> Result<Finding, Rejection> {
        self.describe(candidate, problem, &self.build(candidate, problem)?)
    }

    /// The properties of a kernel that was built, its predicted time and the findings of the diagnosis.
    ///
    /// # Errors
    /// The rejection, when the threads of a CTA wait for each other forever.
    pub fn describe(
        &self,
        candidate: &Candidate,
        problem: &Problem,
        built: &Built,
    ) -> Result<Finding, Rejection> {
        // The figures of a program are the maxima over its kernels.
        let most = |of: &dyn Fn(&Resources) -> u32| built.resources.iter().map(of).max().unwrap_or(0);
        let shared = built.bound.steps().zip(&built.resources);
        let shared = shared.map(|(kernel, found)| found.shared + kernel.launch.dynamic_shared).max();
        let mut screening = Screening {
            ptx_hash: identity(&built.bound, built.text.as_bytes()),
            sass_hash: built.sass_hash.clone(),
            registers: Some(most(&|found| found.registers)),
            spill_bytes: Some(most(&|found| found.spill_stores.max(found.spill_loads))),
            shared_bytes: shared,
            bound: None,
            tile: Some(tile(candidate, &built.bound.kernel)),
        };
        let (mut predicted_us, mut findings) = (None, json!([]));
        // A kernel that the model cannot replay may still be run.
        if let Some((prediction, found)) = self.predict(candidate, problem, built, 1)? {
            screening.bound = Some(word(json!(prediction.bound)));
            predicted_us = Some([prediction.us_low, prediction.us, prediction.us_high]);
            findings = found;
        }
        Ok(Finding::Screened { screening, predicted_us, findings })
    }

    /// The predicted time and the findings, from `times` as many CTAs as a screening records; `None` if the
    /// model fails.
    ///
    /// # Errors
    /// The rejection, when the threads of a CTA wait for each other forever.
    pub fn predict(
        &self,
        candidate: &Candidate,
        problem: &Problem,
        built: &Built,
        times: u64,
    ) -> Result<Option<(Prediction, Value)>, Rejection> {
        match self.forecast(candidate, problem, built, times) {
            Ok(predicted) => Ok(predicted),
            Err(ForecastError::Record(RecordError::Deadlock(wait))) => {
                Err(reject(Stage::Screen, Reason::Hangs, wait))
            }
            Err(_) => Ok(None),
        }
    }

    fn forecast(
        &self,
        candidate: &Candidate,
        problem: &Problem,
        built: &Built,
        times: u64,
    ) -> Result<Option<(Prediction, Value)>, ForecastError> {
        let (bound, resources) = (&built.bound, &built.resources);
        match candidate {
            Candidate::Gpu(plan) => {
                let (gpu, arch) = (self.gpu, &self.arch);
                let basis = forecast::of_kernel(plan, problem, bound, resources, gpu, arch, times)?;
                let diagnosis =
                    study::diagnose_steps(&basis.bound, &basis.recorded, &basis.steps, resources, None);
                Ok(Some((basis.prediction, json!(diagnosis.findings))))
            }
            Candidate::Kernel(_) => {
                let recorded = study::record(bound, forecast::SKETCHED * times)?;
                let steps = study::forecast_steps(bound, bound, &recorded, resources, self.gpu)?;
                let diagnosis = study::diagnose_steps(bound, &recorded, &steps, resources, None);
                let prediction = Prediction::in_a_row(&steps);
                Ok(prediction.map(|prediction| (prediction, json!(diagnosis.findings))))
            }
            Candidate::Cpu(_) => Ok(None),
        }
    }

    /// Runs the gate in the emulator. A plan is checked on a small problem of the same kind, a kernel from
    /// another source on the problem itself.
    ///
    /// # Errors
    /// The rejection, when the kernel cannot be checked.
    pub fn check(&self, candidate: &Candidate, problem: &Problem) -> Result<CheckFact, Rejection> {
        let began = std::time::Instant::now();
        let bound = match candidate {
            Candidate::Gpu(plan) => {
                let small = self.small(plan, problem);
                let arch = Arch { multiprocessors: FEW, ..self.arch };
                bind(plan, &small, &arch)
                    .or_else(|_| bind(plan, problem, &self.arch))
                    .map_err(|e| reject(Stage::Check, Reason::Plan, e))?
            }
            _ => self.bound(candidate, problem)?,
        };
        let check = check_kernel(&bound, &Settings::quick())
            .map_err(|e| reject(Stage::Check, Reason::Incomplete, e))?;
        Ok(fact(Judge::Emulator, &check, began.elapsed().as_secs_f64()))
    }

    /// A problem with the same head_dim, kind of mask and dtype, with more than one tile of rows and of keys,
    /// and ragged ends. A window is shortened to one and a half blocks of keys, so that its bounds lie inside
    /// of the problem. The problem itself if the plan supports nothing smaller.
    pub fn small(&self, plan: &Plan, problem: &Problem) -> Problem {
        let [rows, keys] = plan.tile().map(|n| n as usize);
        let ragged = |seq: usize, tile: usize, tiles: usize| seq.min(tiles * tile + tile / 2 + 3);
        let even = |seq: usize, tile: usize| seq.min(2 * tile.next_multiple_of(64));
        let group = problem.group_size();
        let shorter = |bound: Option<u32>| bound.map(|bound| bound.min((keys * 3 / 2) as u32));
        let band =
            Band { before: shorter(problem.band.before), after: shorter(problem.band.after), ..problem.band };
        let with = |seq_q: usize, seq_kv: usize| {
            let (heads_q, heads_kv) = if group > 1 { (group, 1) } else { (2, 2) };
            Problem { batch: 1, heads_q, heads_kv, seq_q, seq_kv, band, ..problem.clone() }
                .with_layout(Layout::Bhsd)
        };
        let (seq_q, seq_kv) = (problem.seq_q, problem.seq_kv);
        let same = |n: usize| if seq_q == seq_kv { (n, n) } else { (n, seq_kv.min(n)) };
        let (least_q, least_kv) = same(even(seq_q, rows.max(keys)));
        // The second tile of rows is a whole one, and each of its warpgroups has other keys at both bounds.
        let (long_q, long_kv) = same(ragged(seq_q, rows, 2).max(ragged(seq_q, keys, 2)));
        let first = match band.before {
            Some(_) => with(long_q, long_kv),
            None => with(ragged(seq_q, rows, 1), ragged(seq_kv, keys, 2)),
        };
        let candidates = [first, with(ragged(seq_q, rows, 1), seq_kv.min(keys)), with(least_q, least_kv)];
        let fits = |small: &&Problem| small.check().is_ok() && plan.check(small, &self.arch).is_ok();
        candidates.iter().find(fits).unwrap_or(problem).clone()
    }
}

/// A verdict in the ledger's form.
pub fn fact(judge: Judge, check: &CheckReport, seconds: f64) -> CheckFact {
    let hazards: Vec<Value> =
        check.hazards.iter().take(HAZARDS).map(|h| json!(check::gate::HazardRow::from(h))).collect();
    CheckFact {
        judge,
        verdict: check.verdict,
        reasons: check.reasons.clone(),
        hazards: Value::Array(hazards),
        error_rel: check.error.map(|error| error.rel),
        seconds,
    }
}

/// A hash that identifies a program: its code and its launches.
pub(super) fn identity(bound: &Bound, code: &[u8]) -> String {
    let contracts = bound.steps().map(|k| format!("{:?} {:?} {:?}", k.launch, k.args, k.tensor_maps));
    hash(&[code, contracts.collect::<String>().as_bytes()].concat())
}

/// The tile's shape, as a coordinate of the niche.
fn tile(candidate: &Candidate, kernel: &ptx::Kernel) -> String {
    match candidate {
        Candidate::Gpu(Plan::Ladder { rung }) => rung.name().to_owned(),
        Candidate::Gpu(plan) => {
            let [rows, keys] = plan.tile();
            format!("{rows}x{keys}")
        }
        _ => format!("{} threads", kernel.launch.block.count()),
    }
}

fn word(value: Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
