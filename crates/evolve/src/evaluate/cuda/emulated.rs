//! The emulator as a substitute for a GPU, so that the whole cascade except the driver's behaviour can be
//! tested on any machine. Its time is the number of warp instructions. This is not a forecast; it only makes
//! a kernel with fewer instructions faster.

use emu::{Buffer, Checks, EmuError, Emulator, HazardKind, Options};
use judge::values::{Inputs, Values};
use kernels::Arch;
use problem::{Operand, Problem, Tensor};
use ptx::Kernel;

use super::card::{Built, Card};
use super::watched::Watched;
use crate::evaluate::subject::TaskFault;
use bench::provenance::built_from;
use bench::{Entrant, Mode, Race, RaceError, RaceInputs, Reading, Rules, Slot, Stage, Timing, Work, race};
use check::launchfile::{Bound, Role};
use ledger::{Environment, Reason, TimeKind};

/// Warp instructions per simulated µs.
const A_MICROSECOND: f64 = 1000.0;
/// Warp instructions per CTA above which a kernel counts as hanging.
const STEP_LIMIT: u64 = 2_000_000;
/// Number of samples, all equal.
const SAMPLES: usize = 7;

/// The emulator as a [`Card`].
pub struct EmulatedCard {
    arch: Arch,
    emulator: Emulator,
    options: Options,
}

impl EmulatedCard {
    pub fn new(arch: Arch) -> EmulatedCard {
        // A GPU detects no races, but it does detect accesses outside of all buffers.
        let checks = Checks { races: false, uninitialised: false, unwritten: false };
        let options = Options { checks, sm: Some(arch.sm), step_limit: STEP_LIMIT, ..Options::default() };
        EmulatedCard { arch, emulator: Emulator::new(options.clone()), options }
    }
}

/// Translates an error of the emulator into the fault that a GPU would give.
fn fault_of(error: EmuError) -> TaskFault {
    let reason = match &error {
        EmuError::StepLimit { .. } | EmuError::GridLimit { .. } | EmuError::GridSize { .. } => Reason::Hangs,
        EmuError::Hazards { first, .. } if first.contains(HazardKind::Deadlock.name()) => Reason::Hangs,
        EmuError::Hazards { .. } => Reason::Crashed,
        EmuError::Unsupported { .. } | EmuError::Malformed { .. } => Reason::Compile,
        EmuError::MemoryLimit { .. } => Reason::Memory,
        _ => Reason::Launch,
    };
    TaskFault::new(reason, error)
}

/// Warp instructions of a program's launches, scaled to µs.
fn clock(bound: &Bound, buffers: &mut [Buffer], options: &Options) -> Result<f64, EmuError> {
    let mut issued = 0;
    for kernel in bound.steps() {
        let report = emu::run(kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), options)?;
        if let Some(first) = report.hazards.first() {
            return Err(EmuError::Hazards { first: first.to_string(), count: report.hazards.len() });
        }
        issued += report.steps;
    }
    Ok(issued as f64 / A_MICROSECOND)
}

impl Card for EmulatedCard {
    type Machine = Emulator;

    fn arch(&self) -> Arch {
        self.arch
    }

    fn environment(&self) -> Environment {
        Environment {
            device: format!("emulator, sm_{}", self.arch.sm),
            driver: "emulator".to_owned(),
            compiler: "none".to_owned(),
            commit: built_from().map(str::to_owned),
        }
    }

    fn kind(&self) -> TimeKind {
        TimeKind::Predicted
    }

    fn machine(&mut self) -> &mut Emulator {
        &mut self.emulator
    }

    fn fault(error: EmuError) -> TaskFault {
        fault_of(error)
    }

    fn build(&mut self, kernel: &Kernel) -> Result<Built, TaskFault> {
        let found = predict::resources::estimate(&kernel.module, &kernel.entry)
            .ok_or_else(|| TaskFault::new(Reason::Compile, format!("{} has no body", kernel.entry)))?;
        let shared = u64::from(found.shared) + u64::from(kernel.launch.dynamic_shared);
        if shared > u64::from(self.arch.shared_per_cta) {
            let accepted = self.arch.shared_per_cta;
            return Err(TaskFault::new(
                Reason::Resources,
                format!("invalid value '{shared}' for bytes of shared memory: expected at most {accepted}"),
            ));
        }
        Ok(Built {
            registers: found.registers,
            local_bytes: found.stack,
            static_shared: found.shared,
            code: None,
        })
    }

    fn time(&mut self, bound: &Bound, contents: &[Vec<u8>], _: f64) -> Result<Vec<f64>, TaskFault> {
        let mut buffers: Vec<Buffer> = contents.iter().map(|bytes| Buffer::from_bytes(bytes)).collect();
        let us = clock(bound, &mut buffers, &self.options).map_err(fault_of)?;
        Ok(vec![us; SAMPLES])
    }

    fn race(
        &mut self,
        drawn: &RaceInputs,
        pair: [&Bound; 2],
        _: f64,
        turn: &mut dyn FnMut(),
    ) -> Result<Race, TaskFault> {
        let contestants = pair.map(|bound| Runner::new(bound.clone()));
        let entrants = ["candidate", "incumbent"].map(|name| Entrant::ours(Some(name), 1));
        let problem = drawn.problem.clone();
        let stage = Track { problem, contestants, staged: [None, None], options: self.options.clone() };
        let mut stage = Watched { stage, turn };
        let rules = Rules { most_rounds: Rules::LEAST_ROUNDS, ..Rules::new(Mode::Warm, 0.0, None) };
        race(&mut stage, drawn, &entrants, &rules).map_err(|error| match error {
            RaceError::Stage(error) => fault_of(error),
            RaceError::Nobody => TaskFault::new(Reason::Crashed, error),
        })
    }
}

/// A contestant's kernel with its buffers.
struct Runner {
    bound: Bound,
    buffers: Vec<Buffer>,
}

impl Runner {
    fn new(bound: Bound) -> Runner {
        let buffers = bound.kernel.buffers.iter().map(|spec| Buffer::zeroed(spec.bytes)).collect();
        Runner { bound, buffers }
    }

    fn buffer(&mut self, role: Role) -> Option<&mut Buffer> {
        let index = self.bound.roles.iter().position(|&found| found == role)?;
        self.buffers.get_mut(index)
    }
}

struct Track {
    problem: Problem,
    contestants: [Runner; 2],
    staged: [Option<Inputs>; 2],
    options: Options,
}

impl Stage for Track {
    type Error = EmuError;

    fn stage(&mut self, slot: Slot, inputs: &Inputs) -> Result<(), EmuError> {
        self.staged[slot as usize] = Some(inputs.clone());
        Ok(())
    }

    fn load(&mut self, slot: Slot) -> Result<(), EmuError> {
        let Some(inputs) = &self.staged[slot as usize] else { return Ok(()) };
        for contestant in &mut self.contestants {
            let problem = contestant.bound.problem.clone().unwrap_or_else(|| self.problem.clone());
            for tensor in [Tensor::Q, Tensor::K, Tensor::V] {
                if let Some(buffer) = contestant.buffer(Role::Operand(tensor.into())) {
                    *buffer = Buffer::from_bytes(
                        &inputs[tensor.into()].clone().scatter(&problem, tensor).to_bytes(),
                    );
                }
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), EmuError> {
        Ok(())
    }

    fn poison(&mut self, who: usize) -> Result<(), EmuError> {
        if let Some(buffer) = self.contestants[who].buffer(Role::Operand(Operand::OUT)) {
            *buffer = Buffer::from_bytes(&vec![0xff; buffer.len()]);
        }
        Ok(())
    }

    fn run(&mut self, who: usize, work: Work) -> Result<(), EmuError> {
        self.time(who, work).map(|_| ())
    }

    fn time(&mut self, who: usize, _: Work) -> Result<Timing, EmuError> {
        let Runner { bound, buffers } = &mut self.contestants[who];
        let us = clock(bound, buffers, &self.options)?;
        Ok(Timing { us, host_us: us })
    }

    fn output(&mut self, who: usize) -> Result<Values, EmuError> {
        let problem = self.contestants[who].bound.problem.clone().unwrap_or_else(|| self.problem.clone());
        let bytes =
            self.contestants[who].buffer(Role::Operand(Operand::OUT)).map_or_else(Vec::new, |b| b.to_bytes());
        Ok(Values::from_bytes(problem.dtypes.out, &bytes).gather(&problem, Tensor::Out))
    }

    fn read(&mut self) -> Reading {
        Reading::default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use kernels::Family;
    use kernels::select::Shape;
    use serde_json::json;

    use super::*;
    use crate::evaluate::Cuda;
    use crate::evaluate::cuda::HANGS;
    use crate::evaluate::subject::tests::{as_source, tiny};
    use crate::{Candidate, Evaluator, Finding, KernelText, Stage as Step, Target, Task};
    use bench::SpeedVerdict;
    use check::gate::Verdict;
    use check::genes::with_genes;
    use ledger::{CandidateId, Trial};

    fn evaluator() -> Cuda<EmulatedCard> {
        Cuda::new(EmulatedCard::new(Arch::SM_80), None)
    }

    fn task(stage: Step, subject: Candidate) -> Task {
        let target = Target::Cuda { ordinal: 0 };
        let (candidate, problem) = (CandidateId(7), Shape::of(&tiny()));
        Task { candidate, stage, target, problem, subject, incumbent: None, seconds: 0.01 }
    }

    fn plan(genes: serde_json::Value) -> Candidate {
        let default = Family::Mma.default_for(&tiny(), &Arch::SM_80).unwrap();
        Candidate::Gpu(with_genes(&default, &genes).unwrap())
    }

    fn rejected(stage: Step, subject: Candidate) -> (Reason, String) {
        match evaluator().evaluate(&task(stage, subject)).finding {
            Finding::Rejected(found) => {
                assert_eq!(found.stage, stage);
                (found.reason, found.detail)
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_plan_goes_through_the_whole_cascade() {
        let mut evaluator = evaluator();
        let mut look = |task: &Task| evaluator.evaluate(task).finding;
        let Finding::Screened { screening, .. } = look(&task(Step::Screen, plan(json!({})))) else {
            panic!()
        };
        assert!(
            screening.ptx_hash.len() == 12 && screening.registers.is_some_and(|r| r > 16),
            "{screening:?}"
        );
        let Finding::Judged(check) = look(&task(Step::Check, plan(json!({})))) else { panic!() };
        assert_eq!((check.verdict, check.reasons), (Verdict::Passed, Vec::new()));
        let Finding::Timed { check, measurement } = look(&task(Step::Microbench, plan(json!({})))) else {
            panic!()
        };
        assert!(check.unwrap().error_rel.unwrap() > 0.0 && measurement.us > 0.1);
        assert_eq!((measurement.samples.len(), measurement.kind), (SAMPLES, TimeKind::Predicted));
        // Fewer and larger blocks take fewer instructions.
        let keys = |n: u32| plan(json!({ "block_m": 64, "warps": 4, "kv_warps": 1, "block_n": n }));
        let slow = keys(16);
        let incumbent = Some((CandidateId(1), slow));
        for (stage, trial) in [(Step::Race, Trial::Race), (Step::HeldOut, Trial::HeldOut)] {
            let race = Task { incumbent: incumbent.clone(), ..task(stage, keys(64)) };
            let found = look(&race);
            let Finding::Timed { measurement, .. } = found else { panic!("{found:?}") };
            let against = measurement.against.unwrap();
            assert_eq!((measurement.trial, against.incumbent), (trial, CandidateId(1)));
            assert_eq!(against.verdict, SpeedVerdict::Faster, "{against:?}");
            assert!(against.ratio > 1.0 && against.low <= against.ratio, "{against:?}");
        }
        let Finding::Rejected(found) = look(&task(Step::Race, plan(json!({})))) else { panic!() };
        assert_eq!(found.reason, Reason::Crashed);
    }

    /// A race has as many turns as it needs, each as long as a call. The total time of other turns does not
    /// make a turn count as hanging.
    #[test]
    fn each_turn_of_a_race_has_its_own_time() {
        let allowed = Arc::new(Mutex::new(Vec::new()));
        let told = allowed.clone();
        let mut evaluator = evaluator().watched(Box::new(move |time| told.lock().unwrap().push(time)));
        let incumbent = Some((CandidateId(1), plan(json!({}))));
        let found = evaluator.evaluate(&Task { incumbent, ..task(Step::Race, plan(json!({}))) }).finding;
        assert!(matches!(found, Finding::Timed { .. }), "{found:?}");
        let (allowed, turns) = (allowed.lock().unwrap(), 2 * 3 * Rules::LEAST_ROUNDS);
        assert!(allowed.len() > turns && allowed.iter().all(|time| *time >= HANGS), "{allowed:?}");
    }

    /// The kernel as text with one replacement that breaks it.
    fn spoilt(from: &str, to: &str) -> Candidate {
        let good = as_source(&tiny());
        assert!(good.text.contains(from), "{from} is not in:\n{}", good.text);
        Candidate::Kernel(KernelText { text: good.text.replacen(from, to, 1), ..good })
    }

    #[test]
    fn kernels_that_fail_are_told_apart() {
        let first = "ld.param.u64";
        let hang = format!("{{\nFOREVER:\n\tbra FOREVER;\n}}\n\t{first}");
        let (reason, detail) = rejected(Step::Microbench, spoilt(first, &hang));
        assert_eq!(reason, Reason::Hangs, "{detail}");
        let (reason, detail) =
            rejected(Step::Microbench, spoilt("\tret;", "\tst.global.u32 [0], 7;\n\tret;"));
        assert_eq!(reason, Reason::Crashed, "{detail}");
        // The kernel runs, but Q and K are swapped.
        let source = as_source(&tiny());
        let (q, k) = ("role = \"q\"", "role = \"k\"");
        let swapped =
            source.launch.replacen(q, "role = \"?\"", 1).replacen(k, q, 1).replacen("role = \"?\"", k, 1);
        let (reason, detail) =
            rejected(Step::Microbench, Candidate::Kernel(KernelText { launch: swapped, ..source }));
        assert!(reason == Reason::Wrong && detail.contains("wrong answer"), "{reason}: {detail}");
        let (reason, detail) = rejected(Step::Screen, plan(json!({ "block_n": 7 })));
        assert!(reason == Reason::Plan && detail.contains("expected"), "{reason}: {detail}");
    }
}
