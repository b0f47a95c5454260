//! Races of FlashCore against other libraries by the rules of the crate `bench`, with CUDA graphs that Python
//! has captured.
#![allow(unsafe_code, reason = "graphs and memory that Python hands over")]

use std::sync::Arc;

use bench::gpu::{Contestant, Tensors, race};
use bench::provenance::Provenance;
use bench::{Identity, Mode, Peaks, RaceInputs, Row, Rules, Sensors, Suite, quantile, suites};
use check::genes::with_genes;
use check::launchfile::Bound;
use driver::{DeviceSlice, GraphExec, Stream};
use flashcore::gpu::Gpu;
use kernels::select::{Device, TunedTable, choose_of};
use kernels::{Plan, emit};
use problem::{Problem, Strides, Tensor};
use pyo3::prelude::*;
use serde_json::json;

use crate::{Stated, argument, device, problem, refused, stated, unsupported};

/// Address of element (0, 0, 0, 0), shape and strides in elements, both in the order batch, head, sequence,
/// dim.
type Described = (usize, [usize; 4], [i64; 4]);

fn mode_named(name: &str) -> PyResult<Mode> {
    let known = Mode::ALL.into_iter().find(|mode| mode.name() == name);
    known.ok_or_else(|| {
        let names = Mode::ALL.map(Mode::name).join(", ");
        argument(format!("invalid value '{name}' for mode: expected {names}"))
    })
}

/// The names of the suites, each with its problems.
#[pyfunction]
pub fn bench_suites() -> Vec<(&'static str, Vec<Stated>)> {
    Suite::ALL.map(|suite| (suite.name(), suite.problems().iter().map(stated).collect())).to_vec()
}

/// The problems of the suite `random`.
#[pyfunction]
pub fn random_problems(seed: u64, count: usize) -> Vec<Stated> {
    bench::random(seed, count).iter().map(stated).collect()
}

/// A device, and the provenance that each row of a run carries.
#[pyclass(frozen, module = "flashcore_bench._bench")]
pub struct Session {
    gpu: Arc<Gpu>,
    stream: Stream,
    peaks: Option<Peaks>,
    provenance: Provenance,
}

#[pymethods]
impl Session {
    #[new]
    fn new(py: Python<'_>, ordinal: i32) -> PyResult<Session> {
        py.detach(|| {
            let gpu = Gpu::open(ordinal).map_err(refused)?;
            let stream = Stream::new(gpu.context()).map_err(device)?;
            let (peaks, provenance) = (Peaks::of(&gpu.info().name), Provenance::of_gpu(gpu.info()));
            Ok(Session { gpu, stream, peaks, provenance })
        })
    }

    /// The name of the device.
    fn device(&self) -> String {
        self.gpu.info().name.clone()
    }

    /// The clean commit of the build. Without it no evidence is written.
    fn commit(&self) -> Option<String> {
        self.provenance.commit.clone()
    }

    /// Where the figures of a run come from, as JSON.
    fn provenance(&self) -> String {
        json!(self.provenance).to_string()
    }

    /// The figures that the rows will lack, so that the user knows before the run.
    fn missing(&self) -> Vec<String> {
        let sensors = Sensors::of(&self.gpu.info().uuid);
        let sensors = sensors.missing().map(|why| format!("no clocks, power or temperatures: {why}"));
        let peaks =
            self.peaks.is_none().then(|| "no floor: the device's peaks are not in the table".to_owned());
        sensors.into_iter().chain(peaks).collect()
    }

    /// The row of a contestant that could not race, as JSON.
    fn failed(&self, suite: &str, name: &str, stated: Stated, mode: &str, why: &str) -> PyResult<String> {
        let row = Row::failed(suite, name, &problem(&stated)?, mode_named(mode)?, why, &self.provenance);
        Ok(json!(row).to_string())
    }

    /// The row of the host time of a call, as JSON. The samples are in µs.
    fn host(&self, name: &str, stated: Stated, calls: u32, samples: Vec<f64>) -> PyResult<String> {
        let mut row = Row::failed("host", name, &problem(&stated)?, Mode::Warm, "", &self.provenance);
        row.us_median = quantile(&samples, 0.5);
        row.us_low = quantile(&samples, 0.05);
        row.us_high = quantile(&samples, 0.95);
        (row.samples, row.rounds, row.calls, row.fault) = (samples.len(), samples.len(), calls, None);
        row.all.us = samples;
        Ok(json!(row).to_string())
    }

    /// Draws the inputs of a race and computes the expected outputs.
    fn race(slf: Py<Session>, py: Python<'_>, stated: Stated) -> PyResult<Race> {
        let problem = problem(&stated)?;
        let drawn = py.detach(|| RaceInputs::draw(&problem, 1)).map_err(argument)?;
        Ok(Race { session: slf, problem, drawn, contestants: Vec::new() })
    }
}

/// One problem and its contestants.
#[pyclass(module = "flashcore_bench._bench")]
pub struct Race {
    session: Py<Session>,
    problem: Problem,
    drawn: RaceInputs,
    contestants: Vec<Contestant<'static>>,
}

impl Race {
    fn enter(&mut self, plan: &Plan, variant: Option<&str>, inputs: [u64; 3]) -> PyResult<()> {
        let session = self.session.get();
        let program = emit(&self.problem, plan, session.gpu.arch()).map_err(unsupported)?;
        let bound = Bound::of_program(program, &self.problem);
        let [q, k, v] = inputs;
        let inputs = [(Tensor::Q, q), (Tensor::K, k), (Tensor::V, v)];
        let inputs = inputs.map(|(tensor, address)| slice(&self.problem, tensor, address));
        let calls = suites::calls(&self.problem);
        let ours = Contestant::kernel(&session.stream, &bound, inputs, calls, variant, Some(json!(plan)));
        self.contestants.push(ours.map_err(unsupported)?);
        Ok(())
    }
}

#[pymethods]
impl Race {
    /// Number of calls in a graph for warm times.
    fn calls(&self) -> u32 {
        suites::calls(&self.problem)
    }

    /// Adds FlashCore with the kernel that a user gets, or with the best kernel of the suite's family. The
    /// inputs are dense.
    fn ours(&mut self, suite: &str, q: u64, k: u64, v: u64) -> PyResult<()> {
        let session = self.session.get();
        let family = Suite::named(suite).and_then(Suite::family);
        let plan = family.map(|family| {
            let device = Device { name: &session.gpu.info().name, arch: *session.gpu.arch() };
            choose_of(family, &self.problem, &device, TunedTable::builtin()).map(|choice| choice.plan)
        });
        let plan = plan.transpose().map_err(unsupported)?;
        let prepared = session.gpu.prepare(&self.problem, plan.as_ref()).map_err(refused)?;
        self.enter(prepared.plan(), None, [q, k, v])
    }

    /// Adds FlashCore a second time, with the same plan and programmatic dependent launch. Returns `false` if
    /// the plan has no gene for that.
    fn ours_overlapping(&mut self, q: u64, k: u64, v: u64) -> PyResult<bool> {
        let first = self.contestants.first().and_then(|c| c.identity().plan.clone());
        let plan = first.and_then(|plan| serde_json::from_value::<Plan>(plan).ok());
        let Some(plan) = plan.and_then(|plan| with_genes(&plan, &json!({ "overlapping": true })).ok()) else {
            return Ok(false);
        };
        self.enter(&plan, Some("overlapping"), [q, k, v])?;
        Ok(true)
    }

    /// Adds another library: its instantiated graphs of [`Race::calls`] calls and of one call, and the
    /// tensors that the graphs read and write. `out_dtype` is the type of its output if that is not the
    /// problem's.
    #[pyo3(signature = (name, warm, cold, q, k, v, out, out_dtype=None))]
    #[expect(clippy::too_many_arguments, reason = "the parts of a peer")]
    fn peer(
        &mut self,
        name: &str,
        warm: u64,
        cold: u64,
        q: Described,
        k: Described,
        v: Described,
        out: Described,
        out_dtype: Option<&str>,
    ) -> PyResult<()> {
        let strides = |tensor, described| strides(&self.problem, tensor, described);
        let mut own = Problem {
            q: strides(Tensor::Q, &q)?,
            k: strides(Tensor::K, &k)?,
            v: strides(Tensor::V, &v)?,
            out: strides(Tensor::Out, &out)?,
            ..self.problem.clone()
        };
        if let Some(dtype) = out_dtype {
            own.dtypes.out = dtype.parse().map_err(argument)?;
        }
        own.check().map_err(argument)?;
        let at = |tensor, described: &Described| slice(&own, tensor, described.0 as u64);
        let tensors = Tensors {
            q: at(Tensor::Q, &q),
            k: at(Tensor::K, &k),
            v: at(Tensor::V, &v),
            out: at(Tensor::Out, &out),
        };
        // SAFETY: PyTorch has instantiated the graphs, the caller keeps them until the race is over, and only
        // the race launches them.
        let (warm, cold) = unsafe { (GraphExec::from_raw(warm), GraphExec::from_raw(cold)) };
        let peer = Contestant::peer(name, own, warm, suites::calls(&self.problem), cold, tensors);
        self.contestants.push(peer.map_err(unsupported)?);
        Ok(())
    }

    /// Races all contestants for about this many seconds. Returns a row for each, as JSON.
    fn run(&self, py: Python<'_>, suite: &str, mode: &str, seconds: f64) -> PyResult<Vec<String>> {
        let (session, mode) = (self.session.get(), mode_named(mode)?);
        let identities: Vec<Identity> = self.contestants.iter().map(|c| c.identity().clone()).collect();
        let rules = Rules::new(mode, seconds, session.peaks);
        let race = py.detach(|| race(session.gpu.context(), &self.drawn, &self.contestants, &rules));
        let race = race.map_err(device)?;
        Ok(race
            .rows(suite, &identities, &session.provenance)
            .iter()
            .map(|row| json!(row).to_string())
            .collect())
    }
}

/// The memory of a PyTorch tensor without negative strides.
fn slice(problem: &Problem, tensor: Tensor, address: u64) -> DeviceSlice<'static> {
    let (elements, _) = problem.span(tensor).unwrap_or_default(); // checked when the problem was stated
    // SAFETY: the package keeps the tensor, or the graph that owns its memory, until the race is over.
    unsafe { DeviceSlice::from_raw(address, elements * problem.dtypes.of(tensor).bytes()) }
}

/// The strides of the rows of a peer's tensor.
///
/// # Errors
/// When the tensor has other extents than the problem's, or its last dimension is not contiguous.
fn strides(problem: &Problem, tensor: Tensor, &(_, shape, strides): &Described) -> PyResult<Strides> {
    let expected = problem.extents(tensor);
    let [batch, head, row, dim] = strides;
    if shape != expected || (dim != 1 && shape[3] > 1) {
        let found = format!("invalid value '{shape:?} with strides {strides:?}' for {}", tensor.name());
        return Err(argument(format!("{found}: expected {expected:?} with a contiguous last dimension")));
    }
    Ok(Strides { batch, head, row })
}
