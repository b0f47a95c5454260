//! Races of attention on the CPU as a model calls it: between other PyTorch operations, in PyTorch's process.
//! Python makes the calls. The crate `bench` decides their order, checks the outputs and computes the
//! statistics.

use std::path::Path;

use bench::provenance::Provenance;
use bench::{
    Entrant, Identity, Mode, RaceError, RaceInputs, Reading, Rules, Slot, Stage, Timing, Work, race,
};
use judge::values::{Inputs, Values};
use problem::{DType, Operand, Problem};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde_json::json;

use crate::{Stated, argument, problem, stated};

/// The name of the suite in the rows.
const SUITE: &str = "model";
/// Largest number of rounds in a race.
const MOST_ROUNDS: usize = 200;

/// The problems: head counts of a small transformer, lengths from the patches of an image to a long text.
#[pyfunction]
pub fn model_problems() -> Vec<Stated> {
    let lengths = [197, 512, 1024, 2048];
    let of = |dtype| lengths.map(|length| stated(&Problem::new(1, 12, length, 64, dtype)));
    [DType::F32, DType::Bf16, DType::F16].into_iter().flat_map(of).collect()
}

/// This CPU, and the provenance that each row of a run carries.
#[pyclass(frozen, module = "flashcore_bench._bench")]
pub struct CpuSession {
    provenance: Provenance,
}

#[pymethods]
impl CpuSession {
    #[new]
    fn new(threads: usize) -> CpuSession {
        CpuSession { provenance: Provenance::of_cpu(Path::new("."), threads) }
    }

    /// The name of the CPU, and the threads that compute.
    fn device(&self) -> String {
        self.provenance.device.clone()
    }

    /// The clean commit of the build. Without it no evidence is written.
    fn commit(&self) -> Option<String> {
        self.provenance.commit.clone()
    }

    /// Where the figures of a run come from, as JSON.
    fn provenance(&self) -> String {
        json!(self.provenance).to_string()
    }

    /// The rates at which all threads read a buffer of so many bytes, at most 512 MiB, and at which they
    /// multiply and add f32 numbers in registers: bytes and FLOP per second, measured now.
    fn peaks(&self, bytes: usize) -> PyResult<(f64, f64)> {
        let read = bench::read_bandwidth(bytes.clamp(1 << 12, 1 << 29));
        let products = bench::products_rate(DType::F32);
        read.zip(products).ok_or_else(|| argument("no rate could be measured"))
    }

    /// Races FlashCore (contestant 0 of `layer`) against `peer` (contestant 1) for about this many seconds.
    /// Returns a row for each, as JSON.
    fn race(
        &self,
        stated: Stated,
        peer: &str,
        layer: Bound<'_, PyAny>,
        seconds: f64,
    ) -> PyResult<Vec<String>> {
        let problem = problem(&stated)?;
        let drawn = RaceInputs::draw(&problem, 1).map_err(argument)?;
        let peer = Entrant::peer(peer, 1).map_err(argument)?;
        let entrants = [Entrant::ours(None, 1), peer];
        let rules = Rules { most_rounds: MOST_ROUNDS, ..Rules::new(Mode::Warm, seconds, None) };
        let mut stage = Layer { layer, dtype: problem.dtypes.out, staged: [None, None] };
        let race = race(&mut stage, &drawn, &entrants, &rules).map_err(|error| match error {
            RaceError::Stage(exception) => exception,
            RaceError::Nobody => argument(error),
        })?;
        let rows = race.rows(SUITE, &[Identity::default(), Identity::default()], &self.provenance);
        Ok(rows.iter().map(|row| json!(row).to_string()).collect())
    }
}

/// A layer of PyTorch operations. The Python object has the methods `load(q, k, v)`, `time(who)`,
/// `forget(who)` and `output(who)`.
struct Layer<'py> {
    layer: Bound<'py, PyAny>,
    dtype: DType,
    staged: [Option<Inputs>; 2],
}

impl Stage for Layer<'_> {
    type Error = PyErr;

    fn stage(&mut self, slot: Slot, inputs: &Inputs) -> PyResult<()> {
        self.staged[slot as usize] = Some(inputs.clone());
        Ok(())
    }

    fn load(&mut self, slot: Slot) -> PyResult<()> {
        let Some(inputs) = &self.staged[slot as usize] else { return Ok(()) };
        let bytes = |operand| PyBytes::new(self.layer.py(), &inputs[operand].to_bytes());
        let qkv = (bytes(Operand::Q), bytes(Operand::K), bytes(Operand::V));
        self.layer.call_method1("load", qkv).map(|_| ())
    }

    fn flush(&mut self) -> PyResult<()> {
        Ok(())
    }

    fn poison(&mut self, who: usize) -> PyResult<()> {
        self.layer.call_method1("forget", (who,)).map(|_| ())
    }

    fn run(&mut self, who: usize, work: Work) -> PyResult<()> {
        self.time(who, work).map(|_| ())
    }

    fn time(&mut self, who: usize, _work: Work) -> PyResult<Timing> {
        let us = self.layer.call_method1("time", (who,))?.extract()?;
        Ok(Timing { us, host_us: us })
    }

    fn output(&mut self, who: usize) -> PyResult<Values> {
        let bytes: Vec<u8> = self.layer.call_method1("output", (who,))?.extract()?;
        Ok(Values::from_bytes(self.dtype, &bytes))
    }

    fn read(&mut self) -> Reading {
        Reading::default()
    }
}
