//! Kernels taken apart on demand, each once.

use std::sync::Arc;

use lab::ledger::CandidateId;
use lab::report::evolution::Exhibit;
use tokio::sync::{OnceCell, Semaphore};

use super::Site;
use super::recent::Recent;
use super::trouble::Trouble;

/// Kernels that are kept; a large one's page has some megabytes.
const KEPT: usize = 64;

/// The kernels that were asked for last.
pub struct Kernels {
    cells: Recent<CandidateId, OnceCell<Arc<Exhibit>>, KEPT>,
    /// One at a time: the emulator works on all cores, and a search may be at work beside it.
    turn: Arc<Semaphore>,
}

impl Default for Kernels {
    fn default() -> Kernels {
        Kernels { cells: Recent::default(), turn: Arc::new(Semaphore::new(1)) }
    }
}

/// A candidate's kernel, taken apart now or before. Whoever asks meanwhile waits for the same.
pub async fn exhibit(site: &Arc<Site>, id: CandidateId) -> Result<Arc<Exhibit>, Trouble> {
    let cell = site.kernels.cells.cell(id);
    let made = cell.get_or_try_init(|| async {
        let turn = Arc::clone(&site.kernels.turn).acquire_owned().await;
        let turn = turn.map_err(|error| Trouble::Internal(error.to_string()))?;
        site.ask(move |_, ledger| {
            // The work goes on when whoever asked has gone, and keeps its turn until it ends.
            let _turn = turn;
            Ok(Arc::new(Exhibit::of(ledger, id)?))
        })
        .await
    });
    made.await.cloned()
}
