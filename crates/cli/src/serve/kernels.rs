//! Disassembles and analyses kernels on demand, each once. The facts from the ledger are read again for each
//! request, because the ledger changes and its file may be replaced.

use std::sync::Arc;

use ledger::CandidateId;
use report::anatomy::Anatomy;
use report::evolution::{AnalysedKernel, Work};
use tokio::sync::{OnceCell, Semaphore};

use super::Site;
use super::recent::Recent;
use super::trouble::Trouble;

/// Number of analysed kernels that are kept. The page of a large kernel takes some megabytes.
const KEPT: usize = 64;

/// The kernels that were requested most recently.
pub struct Kernels {
    cells: Recent<Work, OnceCell<Arc<Result<Anatomy, String>>>, KEPT>,
    /// Admits one analysis at a time: the emulator uses all cores, and a search may run on the machine as
    /// well.
    turn: Arc<Semaphore>,
}

impl Default for Kernels {
    fn default() -> Kernels {
        Kernels { cells: Recent::default(), turn: Arc::new(Semaphore::new(1)) }
    }
}

/// The analysed kernel of a candidate. Simultaneous requests for a kernel wait for one analysis.
pub async fn analysed(site: &Arc<Site>, id: CandidateId) -> Result<AnalysedKernel, Trouble> {
    let work = site.ask(move |_, ledger| Ok(Work::of(ledger, id)?)).await?;
    let cell = site.kernels.cells.cell(work.clone());
    let made = cell.get_or_try_init(|| async {
        let turn = Arc::clone(&site.kernels.turn).acquire_owned().await;
        let turn = turn.map_err(|error| Trouble::Internal(error.to_string()))?;
        let work = work.clone();
        let made = tokio::task::spawn_blocking(move || {
            // The analysis continues if the client has gone, and holds its permit until it ends.
            let _turn = turn;
            Arc::new(work.anatomy())
        });
        made.await.map_err(|error| Trouble::Internal(error.to_string()))
    });
    let anatomy = Arc::clone(made.await?);
    site.ask(move |_, ledger| Ok(AnalysedKernel::with(ledger, id, work, anatomy)?)).await
}

#[cfg(test)]
mod tests {
    use cpu::CpuPlan;
    use evolve::{Candidate, Finding, Outcome, Stage};
    use host::store::Scratch;
    use ledger::{Arm, Environment, Ledger, MeasurementFact, NewCandidate, Run, TimeKind, Trial};
    use problem::Problem;
    use serde_json::json;

    use super::*;
    use crate::serve::pages::Drawn;

    fn begin(path: &std::path::Path, plan: &CpuPlan) -> (Ledger, NewCandidate) {
        let ledger = Ledger::open(path).unwrap();
        let (device, environment) = ("a processor".to_owned(), Environment::default());
        let run = Run { device, config: json!({}), environment, price_per_hour: None };
        let candidate = NewCandidate {
            run: ledger.begin_run(&run).unwrap(),
            problem: kernels::select::Shape::of(&Problem::mission()),
            candidate: Candidate::Cpu(*plan),
            arm: Arm::Evolution,
            operator: ledger::Operator::Restart.into(),
            parents: Vec::new(),
            changes: json!({}),
        };
        assert_eq!(ledger.add_candidate(&candidate).unwrap(), CandidateId(1));
        (ledger, candidate)
    }

    /// A candidate may be timed after its first request, and the ledger may be replaced by another one.
    #[test]
    fn what_a_ledger_says_of_a_kernel_is_read_each_time() {
        let folder = Scratch::new().unwrap();
        let path = folder.path("ledger");
        let site = Arc::new(Site {
            ledger: path.clone(),
            bind: [127, 0, 0, 1].into(),
            kernels: Kernels::default(),
            drawn: Drawn::default(),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let shown = || runtime.block_on(analysed(&site, CandidateId(1))).ok().unwrap();
        let plan = CpuPlan::for_problem(&Problem::mission());
        let (ledger, new) = begin(&path, &plan);
        assert_eq!(shown().time, None);
        let measurement = MeasurementFact {
            trial: Trial::Microbench,
            kind: TimeKind::Measured,
            problem: new.problem,
            samples: vec![5.0],
            us: 5.0,
            low_us: 5.0,
            high_us: 5.0,
            against: None,
        };
        let (stage, finding) = (Stage::Microbench, Finding::Timed { check: None, measurement });
        let (candidate, problem) = (CandidateId(1), new.problem);
        let told = Outcome { candidate, stage, problem, seconds: 0.1, device_seconds: 0.1, finding };
        ledger.tell(&told).unwrap();
        assert_eq!(shown().time, Some((5.0, TimeKind::Measured)));
        drop(ledger);
        std::fs::remove_file(&path).unwrap();
        let other = CpuPlan { block_q: 2 * plan.block_q, ..plan };
        begin(&path, &other);
        assert_eq!(shown().candidate, Candidate::Cpu(other));
    }
}
