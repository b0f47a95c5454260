//! Times FlashCore's plans on a GPU, against each other and against themselves.

use std::path::PathBuf;
use std::sync::Arc;

use bench::gpu::{Contestant, race};
use bench::provenance::Provenance;
use bench::{
    Mode, OURS, Peaks, Race, RaceInputs, Row, Rules, Sensors, SpeedVerdict, Suite, problem_json, reasons,
    suites,
};
use check::gate::bind;
use driver::{Buffer, Context, Stream};
use host::store;
use kernels::select::{Device, TunedTable, choose, choose_of};
use kernels::{Arch, Plan};
use problem::{Problem, Tensor};
use serde_json::json;

use super::{Limits, keep, parse, ratio, title, verdict};
use crate::args::Bench;
use crate::error::CliError;
use crate::terminal::{self, tell};
use crate::{Status, plan, table, unless_closed};

/// Default seconds for each problem and mode.
const SECONDS: f64 = 1.0;
/// Default seconds for each race of a plan against itself.
const CONTROL_SECONDS: f64 = 0.1;
/// The fraction of races of a plan against itself that must be undecided.
const CONTROL_SHARE: f64 = 0.95;

pub fn bench(args: &Bench, ordinal: i32) -> Result<Status, CliError> {
    let (problems, modes, plans) =
        (problems(args)?, modes(args.mode.as_deref().unwrap_or("both"))?, plans(&args.plan)?);
    let bench = Track::open(args, ordinal)?;
    match args.control {
        Some(races) => bench.control(&problems[0], &modes, plans.first(), races),
        None => bench.all(&problems, &modes, &plans),
    }
}

/// A race at these limits takes some minutes on the fastest GPU, and fits the memory of hosts with such a
/// GPU.
const LIMITS: Limits = Limits { flops: 1e15, bytes: 64e9 };

/// The problems to race, each with the name of its suite.
fn problems(args: &Bench) -> Result<Vec<(&'static str, Problem)>, CliError> {
    let mut problems = Vec::new();
    for name in &args.suite {
        let suite = Suite::named(name).ok_or_else(|| CliError::Argument {
            argument: "--suite",
            value: name.clone(),
            accepted: Suite::ALL.map(Suite::name).join(", "),
        })?;
        problems.extend(suite.problems().into_iter().map(|problem| (suite.name(), problem)));
    }
    for text in &args.problem {
        let problem = parse(text, &LIMITS)?;
        problems.push((suites::suite_of(&problem), problem));
    }
    if problems.is_empty() {
        problems
            .extend(Suite::Mission.problems().into_iter().map(|problem| (Suite::Mission.name(), problem)));
    }
    Ok(problems)
}

fn modes(text: &str) -> Result<Vec<Mode>, CliError> {
    match text {
        "both" => Ok(vec![Mode::Warm, Mode::Cold]),
        _ => match Mode::ALL.into_iter().find(|mode| mode.name() == text) {
            Some(mode) => Ok(vec![mode]),
            None => Err(CliError::Argument {
                argument: "--mode",
                value: text.to_owned(),
                accepted: "warm, cold, both (warm and cold), sustained".into(),
            }),
        },
    }
}

/// The name of a plan's file and the plan. Both are `None` if the plan is chosen for each problem.
type Named = (Option<String>, Option<Plan>);

fn plans(files: &[PathBuf]) -> Result<Vec<Named>, CliError> {
    let read = |file: &PathBuf| {
        let text = store::read_text(file)?;
        let plan = plan::gpu("--plan", &file.display().to_string(), &text)?;
        Ok((file.file_stem().map(|name| name.to_string_lossy().into_owned()), Some(plan)))
    };
    match files {
        [] => Ok(vec![(None, None)]),
        files => files.iter().map(read).collect(),
    }
}

/// A device, and the settings of the races on it.
struct Track<'a> {
    args: &'a Bench,
    context: Arc<Context>,
    stream: Stream,
    arch: Arch,
    peaks: Option<Peaks>,
    provenance: Provenance,
    evidence: Option<PathBuf>,
}

impl Track<'_> {
    fn open(args: &Bench, ordinal: i32) -> Result<Track<'_>, CliError> {
        let context = Context::open(ordinal)?;
        let info = context.info();
        let provenance = Provenance::of_gpu(info);
        if args.evidence.is_some() && provenance.commit.is_none() {
            return Err(CliError::Unbuilt);
        }
        let arch = Arch::of(info.sm()).ok_or_else(|| CliError::Argument {
            argument: "--device",
            value: format!("{} (sm_{})", info.name, info.sm()),
            accepted: Arch::ALL.map(|arch| format!("sm_{}", arch.sm)).join(", "),
        })?;
        let peaks = Peaks::of(&info.name);
        if peaks.is_none() {
            tell(format_args!("the peaks of {} are not in the table: no floor is checked", info.name));
        }
        if let Some(why) = Sensors::of(&info.uuid).missing() {
            tell(format_args!("no clocks, power or temperatures in this run: {why}"));
        }
        let file = info.name.split(' ').next_back().unwrap_or("gpu").to_lowercase();
        let default = || PathBuf::from(format!("evidence/{file}.jsonl"));
        let evidence = args.evidence.clone().map(|given| given.unwrap_or_else(default));
        evidence.as_deref().map_or(Ok(()), store::appendable)?;
        Ok(Track {
            args,
            stream: Stream::new(&context)?,
            arch: Arch { multiprocessors: info.sms, ..arch },
            peaks,
            provenance,
            evidence,
            context,
        })
    }

    /// Races every problem in every mode. A problem that fails is reported, and the next one runs, unless the
    /// failure has lost the GPU.
    fn all(
        &self,
        problems: &[(&'static str, Problem)],
        modes: &[Mode],
        plans: &[Named],
    ) -> Result<Status, CliError> {
        let (mut cells, mut faults) = (Vec::new(), 0);
        let bar = super::races(problems.len(), self.args.json);
        for (index, (suite, problem)) in problems.iter().enumerate() {
            bar.at(index as u64, &format!("race {} of {}: {}", index + 1, problems.len(), title(problem)));
            match self.one(suite, problem, modes, plans) {
                Ok(races) => {
                    faults += races
                        .iter()
                        .flat_map(|race| &race.measurements)
                        .filter(|m| m.fault.is_some())
                        .count();
                    cells.extend(races.iter().flat_map(rows_of));
                }
                // An error of the output ends the races, because later rows would be lost too.
                Err(error @ (CliError::Store(_) | CliError::Output(_))) => return Err(error),
                Err(error) => {
                    faults += 1;
                    terminal::fault(format_args!("{}: {error}", title(problem)));
                    let row =
                        Row::failed(suite, OURS, problem, modes[0], &error.to_string(), &self.provenance);
                    self.keep(&json!(row))?;
                    if self.context.poisoned().is_some() {
                        let left = problems.len() - index - 1;
                        tell(format_args!(
                            "the GPU does not accept more work: {left} problems were not raced"
                        ));
                        break;
                    }
                }
            }
        }
        drop(bar);
        if !self.args.json {
            let header = [
                "problem",
                "mode",
                "plan",
                "µs",
                "5–95 %",
                "TFLOP/s",
                "error / allowed",
                "the first is faster by",
                "verdict",
                "MHz",
                "throttled",
            ];
            let mut out = crate::terminal::out();
            unless_closed(table::print(&mut out, &header, &cells).map_err(CliError::from))?;
        }
        Ok(if faults == 0 { Status::Passed } else { Status::Failed })
    }

    fn one(
        &self,
        suite: &str,
        problem: &Problem,
        modes: &[Mode],
        plans: &[Named],
    ) -> Result<Vec<Race>, CliError> {
        let drawn = RaceInputs::draw(problem, 1)?;
        let inputs = inputs(&self.context, problem)?;
        let calls = suites::calls(problem);
        let contestants = plans
            .iter()
            .map(|plan| self.contestant(suite, problem, plan, &inputs, calls))
            .collect::<Result<Vec<_>, _>>()?;
        let identities: Vec<_> = contestants.iter().map(|c| c.identity().clone()).collect();
        let mut races = Vec::new();
        for &mode in modes {
            let rules = Rules::new(mode, self.args.seconds.unwrap_or(SECONDS), self.peaks);
            let race = race(&self.context, &drawn, &contestants, &rules)?;
            for fault in race.measurements.iter().filter_map(|m| m.fault.as_ref()) {
                terminal::fault(format_args!("{} {}: {fault}", title(problem), mode.name()));
            }
            for row in race.rows(suite, &identities, &self.provenance) {
                self.keep(&json!(row))?;
            }
            races.push(race);
        }
        Ok(races)
    }

    /// Loads a kernel of FlashCore and captures its graphs. The name distinguishes several plans.
    fn contestant<'a>(
        &self,
        suite: &str,
        problem: &Problem,
        named: &Named,
        inputs: &'a [Buffer; 3],
        calls: u32,
    ) -> Result<Contestant<'a>, CliError> {
        let plan = match &named.1 {
            Some(plan) => plan.clone(),
            None => self.chosen(suite, problem)?,
        };
        let bound = bind(&plan, problem, &self.arch)?;
        let slices = [inputs[0].slice(), inputs[1].slice(), inputs[2].slice()];
        Ok(Contestant::kernel(&self.stream, &bound, slices, calls, named.0.as_deref(), Some(json!(plan)))?)
    }

    /// The plan that a user gets, or the best plan of the suite's family if the suite has one.
    fn chosen(&self, suite: &str, problem: &Problem) -> Result<Plan, CliError> {
        let device = Device { name: &self.context.info().name, arch: self.arch };
        let choice = match Suite::named(suite).and_then(Suite::family) {
            Some(family) => choose_of(family, problem, &device, TunedTable::builtin())?,
            None => choose(problem, &device, TunedTable::builtin())?,
        };
        Ok(choice.plan)
    }

    /// Races the first plan against itself, loaded and captured twice (an A/A test).
    fn control(
        &self,
        (suite, problem): &(&'static str, Problem),
        modes: &[Mode],
        plan: Option<&Named>,
        races: u32,
    ) -> Result<Status, CliError> {
        let drawn = RaceInputs::draw(problem, 1)?;
        let inputs = inputs(&self.context, problem)?;
        let plan = plan.and_then(|(_, plan)| plan.clone());
        let again = |name: &str| {
            let named = (Some(name.to_owned()), plan.clone());
            self.contestant(suite, problem, &named, &inputs, suites::calls(problem))
        };
        let mut passed = true;
        for &mode in modes {
            let mut counts = [0usize; 3];
            let mut ratios = Vec::new();
            for seed in 0..u64::from(races) {
                let seconds = self.args.seconds.unwrap_or(CONTROL_SECONDS);
                let rules = Rules { seed, ..Rules::new(mode, seconds, self.peaks) };
                // Both are loaded again for each race, because the addresses of kernel and tensors are part
                // of the noise.
                let race = race(&self.context, &drawn, &[again("a")?, again("b")?], &rules)?;
                if let Some(found) = race.measurements[1].comparison {
                    counts[found.verdict as usize] += 1;
                    ratios.push(found.ratio);
                }
            }
            let undecided = counts[SpeedVerdict::Undecided as usize];
            passed &= undecided as f64 >= CONTROL_SHARE * f64::from(races);
            let (faster, slower) =
                (counts[SpeedVerdict::Faster as usize], counts[SpeedVerdict::Slower as usize]);
            tell(format_args!(
                "{} {}: of {races} races against itself {undecided} UNDECIDED, {faster} FASTER, {slower} SLOWER",
                title(problem),
                mode.name()
            ));
            let mut row = json!({
                "suite": "control", "impl": OURS, "problem": problem_json(problem), "mode": mode,
                "races": races, "undecided": undecided, "faster": faster, "slower": slower,
                "margin": mode.margin(), "ratios": ratios,
            });
            merge(&mut row, json!(self.provenance));
            self.keep(&row)?;
        }
        Ok(if passed { Status::Passed } else { Status::Failed })
    }

    fn keep(&self, row: &serde_json::Value) -> Result<(), CliError> {
        keep(row, self.evidence.as_deref(), self.args.json)
    }
}

fn merge(row: &mut serde_json::Value, more: serde_json::Value) {
    if let (Some(row), serde_json::Value::Object(more)) = (row.as_object_mut(), more) {
        row.extend(more);
    }
}

fn inputs(context: &Arc<Context>, problem: &Problem) -> Result<[Buffer; 3], CliError> {
    let buffer = |tensor: Tensor| {
        let elements = problem.span(tensor).map_or(0, |(elements, _)| elements);
        Buffer::new(context, elements * problem.dtypes.of(tensor).bytes())
    };
    Ok([buffer(Tensor::Q)?, buffer(Tensor::K)?, buffer(Tensor::V)?])
}

fn rows_of(race: &Race) -> Vec<Vec<String>> {
    let cell = |m: &bench::Measurement| {
        let (us, times) = (m.us(), m.times());
        let clocks: Vec<f64> = m.samples.iter().filter_map(|s| s.reading.clock_mhz).map(f64::from).collect();
        let throttle = m.samples.iter().filter(|s| s.reading.throttled());
        let bits = throttle.clone().fold(0, |bits, s| bits | s.reading.throttle.unwrap_or(0));
        let number =
            |x: f64, digits: usize| if x.is_finite() { format!("{x:.digits$}") } else { "–".into() };
        let range = [0.05, 0.95].map(|at| number(bench::quantile(&times, at), 2)).join("–");
        vec![
            title(&race.problem),
            race.mode.name().to_owned(),
            m.name.clone(),
            number(us, 2),
            range,
            number(race.problem.flops() / us * 1e-6, 1),
            m.error.map_or("–".into(), |e| e.brief()),
            if m.fault.is_some() { "n/a".into() } else { ratio(m) },
            verdict(m).to_owned(),
            number(bench::median(&clocks), 0),
            if bits == 0 {
                "–".into()
            } else {
                format!("{}: {}", throttle.count(), reasons(bits).join(", "))
            },
        ]
    };
    race.measurements.iter().map(cell).collect()
}
