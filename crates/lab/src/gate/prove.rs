//! Runs a kernel as the gate's law asks and judges what comes out.

use std::ops::Range;

use cpu::CpuError;
use emu::{Buffer, EmuError, Options, Schedule};
use problem::{Problem, Tensor};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::inputs::{Style, draw, rows_of};
use super::judge::judge;
use super::quantised::{Codes, distance, encode};
use super::{Proof, Verdict};
use crate::launchfile::{Bound, BufferType, Init, Role};
use crate::values::{Inputs, Values};

/// Ten seconds and more for one CTA.
const STEP_LIMIT: u64 = 50_000_000;

/// Some minutes for a grid on two cores (the slowest rung on the mission problem takes a fiftieth): a kernel that needs more is to be judged on a smaller problem.
const GRID_LIMIT: u64 = 1 << 31;

/// How thorough the gate is.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The runs: what is fed, from which seed, and in which order things happen.
    pub runs: Vec<(Style, u64, Schedule)>,
    /// CTAs of the first run to record for the time model.
    pub traced_ctas: u64,
    /// Warp instructions a CTA may issue.
    pub step_limit: u64,
    /// Warp instructions that all CTAs of a run may issue together.
    pub grid_limit: u64,
}

impl Settings {
    /// Every style once, each under another schedule and another seed; normal draws under every schedule.
    pub fn thorough() -> Settings {
        let schedules = [Schedule::Late, Schedule::Early, Schedule::Random];
        let normal = schedules.iter().enumerate().map(|(i, &s)| (Style::Normal, i as u64 + 1, s));
        let others = Style::ALL.into_iter().filter(|&s| s != Style::Normal).enumerate();
        let others = others.map(|(i, style)| (style, i as u64 + 11, schedules[i % 3]));
        Settings {
            runs: normal.chain(others).collect(),
            traced_ctas: 4,
            step_limit: STEP_LIMIT,
            grid_limit: GRID_LIMIT,
        }
    }

    /// Normal draws under two schedules, and inputs whose maximum moves: for a first look, and for torture problems, of
    /// which there are many.
    pub fn quick() -> Settings {
        let runs = vec![
            (Style::Normal, 1, Schedule::Late),
            (Style::Rising, 2, Schedule::Random),
            (Style::Falling, 3, Schedule::Late),
            (Style::PoisonedPadding, 4, Schedule::Early),
        ];
        Settings { runs, traced_ctas: 4, step_limit: STEP_LIMIT, grid_limit: GRID_LIMIT }
    }
}

impl Settings {
    /// Only the first run of these.
    pub fn first_run(&self) -> Settings {
        Settings { runs: self.runs.iter().take(1).copied().collect(), ..self.clone() }
    }
}

/// Why there is no verdict at all.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The launch contract and the kernel do not fit each other.
    #[error("the kernel cannot be launched: {0}")]
    Launch(EmuError),
    /// The oracle refused the problem.
    #[error("the oracle refuses the problem: {0}")]
    Oracle(#[from] CpuError),
    /// Something else went wrong.
    #[error("{0}")]
    Other(String),
}

/// Puts a kernel through the gate.
///
/// # Errors
/// When it cannot even be launched, or the problem cannot be stated.
pub fn prove(bound: &Bound, settings: &Settings) -> Result<Proof, GateError> {
    let mut proof = Proof::empty();
    for (index, &(style, seed, schedule)) in settings.runs.iter().enumerate() {
        // Without a problem nothing depends on what is drawn; only the schedules differ.
        if bound.problem.is_none() && style != Style::Normal && index > 0 {
            continue;
        }
        let traced_ctas = match index {
            0 => emu::trace::sample_ctas(bound.kernel.launch.grid.count(), settings.traced_ctas),
            _ => Vec::new(),
        };
        let options = Options {
            seed,
            schedule,
            traced_ctas,
            step_limit: settings.step_limit,
            grid_limit: settings.grid_limit,
            must_write: must_write(bound),
            ..Options::default()
        };
        run_once(bound, style, seed, &options, &mut proof)?;
        if proof.verdict != Verdict::Proven {
            break; // further runs would only repeat it
        }
    }
    Ok(proof)
}

/// Puts a generator through the gate: one kernel for each problem that it can compute. `emit` gives `None` for problems
/// that it does not claim.
///
/// # Errors
/// As [`prove`].
pub fn prove_family(
    problems: &[super::torture::Torture],
    settings: &Settings,
    emit: impl Fn(&Problem) -> Option<Bound>,
) -> Result<Proof, GateError> {
    let mut family = Proof::empty();
    for torture in problems {
        if let Some(bound) = emit(&torture.problem) {
            family.absorb(prove(&bound, settings)?, torture.name);
        }
    }
    Ok(family)
}

/// What each buffer holds before a run on normal draws; zeros where the kernel is to write.
pub fn contents(bound: &Bound, seed: u64) -> Vec<Vec<u8>> {
    let drawn = bound.problem.as_ref().map(|problem| draw(problem, Style::Normal, seed));
    let quantised =
        bound.problem.as_ref().zip(drawn.as_ref()).filter(|_| bound.roles.contains(&Role::Scales));
    let codes = quantised.map(|(problem, drawn)| encode(problem, drawn));
    allocate(bound, drawn.as_ref(), codes.as_ref(), seed).iter().map(Buffer::to_bytes).collect()
}

fn run_once(
    bound: &Bound,
    style: Style,
    seed: u64,
    options: &Options,
    proof: &mut Proof,
) -> Result<(), GateError> {
    let quantises = bound.roles.contains(&Role::Scales);
    if quantises && style == Style::NonFinite {
        return Ok(()); // codes hold neither NaN nor infinity
    }
    let drawn = bound.problem.as_ref().map(|problem| draw(problem, style, seed));
    let codes = bound.problem.as_ref().zip(drawn.as_ref()).filter(|_| quantises);
    let codes = codes.map(|(problem, drawn)| encode(problem, drawn));
    let mut buffers = allocate(bound, drawn.as_ref(), codes.as_ref(), seed);
    let before: Vec<Vec<u8>> = buffers.iter().map(Buffer::to_bytes).collect();
    let mut handles: Vec<&mut Buffer> = buffers.iter_mut().collect();
    let report = match emu::run(&bound.kernel, &mut handles, options) {
        Ok(report) => report,
        Err(
            error @ (EmuError::Unsupported { .. }
            | EmuError::StepLimit { .. }
            | EmuError::GridLimit { .. }
            | EmuError::MemoryLimit { .. }),
        ) => {
            proof.leave_incomplete(error.to_string());
            return Ok(());
        }
        Err(error) => return Err(GateError::Launch(error)),
    };
    proof.runs += 1;
    proof.steps += report.steps;
    if proof.runs == 1 {
        proof.counters = report.counters;
        proof.traces = report.traces;
    }
    proof.add_hazards(report.hazards);
    check_inputs_kept(bound, &before, &buffers, proof);
    if bound.problem.is_some() {
        // What one launch leaves for the next could be an answer.
        for name in report.changed {
            proof.refute(format!("the kernel keeps something in {name} from one launch to the next"));
        }
    }
    if let (Some(problem), Some(drawn)) = (&bound.problem, &drawn) {
        let judged = codes.as_ref().map_or(drawn, |c| &c.decoded);
        check_outputs(bound, problem, judged, style, &buffers, proof)?;
        if codes.is_some() && proof.quantisation.is_none() {
            proof.quantisation = Some(distance(&judged.oracle(problem)?.out, &drawn.oracle(problem)?.out));
        }
    }
    Ok(())
}

fn allocate(bound: &Bound, inputs: Option<&Inputs>, codes: Option<&Codes>, seed: u64) -> Vec<Buffer> {
    let quantised = |tensor: Tensor| codes.map(|c| &c.codes[tensor as usize]);
    let specs = bound.kernel.buffers.iter().zip(&bound.roles).enumerate();
    specs
        .map(|(index, (spec, role))| match (role, inputs) {
            (Role::Tensor(Tensor::Q), Some(inputs)) => Buffer::from_bytes(&inputs.q.to_bytes()),
            (Role::Tensor(Tensor::K), Some(inputs)) => Buffer::from_bytes(&inputs.k.to_bytes()),
            (Role::Tensor(Tensor::V), Some(inputs)) => Buffer::from_bytes(&inputs.v.to_bytes()),
            (Role::Fill { dtype, init }, _) => filled(spec.bytes, *dtype, *init, seed + index as u64),
            (Role::Codes(tensor @ (Tensor::Q | Tensor::K | Tensor::V)), _) => quantised(*tensor)
                .map_or_else(|| Buffer::uninitialised(spec.bytes), |c| Buffer::from_bytes(c)),
            (Role::Scales, _) => {
                let scales = codes.iter().flat_map(|c| &c.scales).flat_map(|x| x.to_le_bytes());
                Buffer::from_bytes(&scales.collect::<Vec<u8>>())
            }
            (Role::Tensor(_) | Role::Lse | Role::Codes(Tensor::Out), _) => Buffer::uninitialised(spec.bytes),
        })
        .collect()
}

fn filled(bytes: usize, dtype: BufferType, init: Init, seed: u64) -> Buffer {
    let elements = bytes / dtype.bytes();
    let mut rng = SmallRng::seed_from_u64(seed);
    let data: Vec<u8> = match init {
        Init::Uninitialised => return Buffer::uninitialised(bytes),
        Init::Zeros => vec![0; bytes],
        Init::Iota => (0..elements).flat_map(|i| dtype.encode(i as f64)).collect(),
        Init::Random => (0..elements).flat_map(|_| dtype.encode(dtype.draw(rng.random::<f64>()))).collect(),
    };
    Buffer::from_bytes(&data)
}

fn check_inputs_kept(bound: &Bound, before: &[Vec<u8>], after: &[Buffer], proof: &mut Proof) {
    let specs = bound.kernel.buffers.iter().zip(&bound.roles);
    for ((spec, role), (before, after)) in specs.zip(before.iter().zip(after)) {
        let input =
            matches!(role, Role::Tensor(Tensor::Q | Tensor::K | Tensor::V) | Role::Codes(_) | Role::Scales);
        if input && *before != after.to_bytes() {
            proof.refute(format!("the kernel changed its input {}", spec.name));
        }
    }
}

fn check_outputs(
    bound: &Bound,
    problem: &Problem,
    inputs: &Inputs,
    style: Style,
    buffers: &[Buffer],
    proof: &mut Proof,
) -> Result<(), GateError> {
    let contents =
        |wanted: Role| bound.roles.iter().position(|&r| r == wanted).map(|i| buffers[i].to_bytes());
    let Some(out) = contents(Role::Tensor(Tensor::Out)) else { return Ok(()) };
    let lse = contents(Role::Lse)
        .map(|bytes| wide(&Values::from_bytes(problem::DType::F32, &bytes), 0..usize::MAX));
    let rows = row_ranges(problem);
    check_gaps(&out, &rows, problem.dtype.bytes(), proof);
    let values = Values::from_bytes(problem.dtype, &out);
    let dense: Vec<f64> = rows.into_iter().flat_map(|row| wide(&values, row)).collect();
    let (oracle, standard) = (inputs.oracle(problem)?, inputs.reference_in_precision(problem)?);
    let figures = judge(problem, &dense, lse.as_deref(), &oracle, &standard);
    for reason in figures.reasons() {
        proof.refute(format!("wrong answer on {} inputs: {reason}", style.name()));
    }
    proof.error = Some(proof.error.map_or(figures, |worst| worst.worst(figures)));
    Ok(())
}

fn wide(values: &Values, range: Range<usize>) -> Vec<f64> {
    let range = range.start..range.end.min(values.len());
    range.filter_map(|i| values.get(i)).map(f64::from).collect()
}

/// Elements of each output row, in the order (batch, head, row).
fn row_ranges(problem: &Problem) -> Vec<Range<usize>> {
    let origin = problem.span(Tensor::Out).map_or(0, |(_, origin)| origin) as i64;
    rows_of(problem.batch, problem.heads_q, problem.seq_q)
        .map(|(b, h, r)| {
            let start = (origin + problem.out.offset(b, h, r)) as usize;
            start..start + problem.head_dim_v
        })
        .collect()
}

/// What lies between rows must still hold the pattern it started with.
fn check_gaps(out: &[u8], rows: &[Range<usize>], bytes: usize, proof: &mut Proof) {
    let mut covered = vec![false; out.len()];
    for row in rows {
        covered[row.start * bytes..row.end * bytes].fill(true);
    }
    let stray = out.iter().zip(&covered).position(|(&byte, &covered)| !covered && byte != 0xff);
    if let Some(at) = stray {
        proof.refute(format!("byte {at} of out belongs to no row and was written"));
    }
}

/// The bytes of `out` and `lse` that must be written.
fn must_write(bound: &Bound) -> std::collections::HashMap<usize, Vec<Range<usize>>> {
    let Some(problem) = &bound.problem else { return Default::default() };
    let at = bound.roles.iter().position(|&r| r == Role::Tensor(Tensor::Out));
    let Some(index) = at else { return Default::default() };
    let bytes = problem.dtype.bytes();
    let mut rows = row_ranges(problem);
    rows.sort_by_key(|r| r.start);
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for row in rows {
        let (start, end) = (row.start * bytes, row.end * bytes);
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    [(index, ranges)].into()
}
