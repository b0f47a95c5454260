//! Kernels taken apart on demand, each once.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use lab::ledger::CandidateId;
use lab::report::evolution::Exhibit;
use tokio::sync::{OnceCell, Semaphore};

use super::Site;
use super::trouble::Trouble;

/// Kernels that are kept; a large one's page has some megabytes.
const KEPT: usize = 64;

type Cell = Arc<OnceCell<Arc<Exhibit>>>;

/// The kernels that were asked for last.
pub struct Kernels {
    cells: Mutex<(HashMap<CandidateId, Cell>, VecDeque<CandidateId>)>,
    /// One at a time: the emulator works on all cores, and a search may be at work beside it.
    turn: Semaphore,
}

impl Default for Kernels {
    fn default() -> Kernels {
        Kernels { cells: Mutex::default(), turn: Semaphore::new(1) }
    }
}

impl Kernels {
    fn cell(&self, id: CandidateId) -> Cell {
        let mut cells = self.cells.lock().unwrap_or_else(PoisonError::into_inner);
        let (known, order) = &mut *cells;
        if let Some(cell) = known.get(&id) {
            return Arc::clone(cell);
        }
        if order.len() >= KEPT
            && let Some(oldest) = order.pop_front()
        {
            known.remove(&oldest);
        }
        order.push_back(id);
        Arc::clone(known.entry(id).or_default())
    }
}

/// A candidate's kernel, taken apart now or before. Whoever asks meanwhile waits for the same.
pub async fn exhibit(site: &Arc<Site>, id: CandidateId) -> Result<Arc<Exhibit>, Trouble> {
    let cell = site.kernels.cell(id);
    let made = cell.get_or_try_init(|| async {
        let turn = site.kernels.turn.acquire().await;
        let _turn = turn.map_err(|error| Trouble::Internal(error.to_string()))?;
        site.ask(move |_, ledger| Ok(Arc::new(Exhibit::of(ledger, id)?))).await
    });
    made.await.cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten() {
        let kernels = Kernels::default();
        let first = kernels.cell(CandidateId(0));
        assert!(Arc::ptr_eq(&first, &kernels.cell(CandidateId(0))));
        for id in 1..=KEPT as i64 {
            kernels.cell(CandidateId(id));
        }
        assert!(!Arc::ptr_eq(&first, &kernels.cell(CandidateId(0))));
        assert_eq!(kernels.cells.lock().unwrap().0.len(), KEPT);
    }
}
