//! Tests of attention kernels on a machine: correct outputs, equal to the emulator's, and reproducible.

use std::sync::Arc;

use climb::ladder::{Expected, rungs};
use emu::{Checks, Emulator, Options};
use judge::inputs::Style;
use judge::outputs::References;
use kernels::{Arch, Plan};
use problem::{DType, Problem};
use ptx::{Machine, Op, Statement, UnaryOp};
use rayon::prelude::*;

use super::plans::Variant;
use super::{Check, FEW, Making, Settings};
use check::gate::torture::{Torture, problems};
use check::gate::{Feed, Verdict, bind, trial};
use check::launchfile::Bound;

/// A problem with inputs and references.
struct Case {
    problem: Torture,
    style: Style,
    feed: Feed,
    references: Option<Arc<References>>,
}

/// The torture set on variations of each family's plan. `progress` gets each check.
pub fn torture<M: Machine>(
    machine: &mut M,
    arch: &Arch,
    settings: &Settings,
    progress: &mut dyn FnMut(&Check),
) -> Vec<Check> {
    let mut checks = Vec::new();
    for &(dtype, dim, variants) in &settings.kinds {
        let cases = cases(dtype, dim, arch, settings);
        for variant in settings.variants(variants) {
            let mut right = Making::new("attention", variant.title(dtype, dim));
            let mut bits = Making::new("emulator's bits", right.check.name.clone());
            let mut emulate = Vec::new();
            for case in &cases {
                let Some(made) = variant.plan(&case.problem.problem, arch) else { continue };
                let ran = run(machine, arch, &made, case, &mut right);
                let compared = |ran: &Ran| settings.bit_styles.contains(&case.style) && ran.is_exact();
                emulate.extend(ran.filter(compared));
            }
            bits.check.cases = emulate.len() as u64;
            let found: Vec<_> = emulate.par_iter().filter_map(|ran| ran.compare(arch)).collect();
            found.into_iter().for_each(|(verdict, why)| bits.find(verdict, why));
            // A variant that fits no problem of the kind gives no check.
            for making in [right, bits] {
                if making.check.cases > 0 || !making.check.notes.is_empty() {
                    checks.push(making.done());
                    checks.last().into_iter().for_each(&mut *progress);
                }
            }
        }
    }
    checks
}

fn cases(dtype: DType, dim: usize, arch: &Arch, settings: &Settings) -> Vec<Case> {
    let problems: Vec<Torture> = problems(dtype, dim).into_iter().step_by(settings.every).collect();
    let both = problems.iter().flat_map(|problem| settings.styles.iter().map(move |&style| (problem, style)));
    let both: Vec<(&Torture, Style)> = both.collect();
    both.into_par_iter()
        .enumerate()
        .filter_map(|(seed, (torture, style))| {
            let (problem, plan) = Variant::all().first()?.plan(&torture.problem, arch)?;
            let bound = bind(&plan, &problem, arch).ok()?;
            let feed = Feed::draw(&bound, style, seed as u64 + 1)?;
            let references = feed.references(&bound).ok()?;
            Some(Case { problem: torture.clone(), style, feed, references })
        })
        .collect()
}

/// The result of a machine for a case.
struct Ran<'a> {
    name: String,
    bound: Bound,
    feed: &'a Feed,
    outputs: Vec<u8>,
}

/// Runs one plan on one case.
fn run<'a, M: Machine>(
    machine: &mut M,
    arch: &Arch,
    (problem, plan): &(Problem, Plan),
    case: &'a Case,
    right: &mut Making,
) -> Option<Ran<'a>> {
    let name = format!("{}, {}", case.problem.name, case.style.name());
    right.check.cases += 1;
    let bound = match bind(plan, problem, arch) {
        Ok(bound) => bound,
        Err(error) => {
            right.fail(format!("{name}: {error}"));
            return None;
        }
    };
    let outcome = match trial(machine, &bound, &case.feed, case.references.as_deref()) {
        Ok(outcome) => outcome,
        Err(error) => {
            right.fail(format!("{name}: {error}"));
            return None;
        }
    };
    for reason in &outcome.reasons {
        right.fail(format!("{name}: {reason}"));
    }
    let outputs = outcome.outputs(&bound);
    Some(Ran { name, bound, feed: &case.feed, outputs })
}

impl Ran<'_> {
    /// Whether the emulator has every result to the bit. Of the instructions of these kernels, it has
    /// `tanh.approx` within its error bound only.
    fn is_exact(&self) -> bool {
        let bodies = self.bound.kernel.module.functions().filter_map(|function| function.body.as_ref());
        let mut statements = bodies.flat_map(|body| &body.statements);
        !statements.any(|s| matches!(s, Statement::Inst(i) if matches!(i.op, Op::Unary(UnaryOp::Tanh, ..))))
    }

    /// The difference from the emulator's outputs, if any.
    fn compare(&self, arch: &Arch) -> Option<(Verdict, String)> {
        let checks = Checks { races: false, uninitialised: false, unwritten: false };
        let mut emulator = Emulator::new(Options { checks, sm: Some(arch.sm), ..Options::default() });
        let emulated = match trial(&mut emulator, &self.bound, self.feed, None) {
            Ok(outcome) => outcome.outputs(&self.bound),
            Err(error) => return Some((Verdict::Incomplete, format!("{}: {error}", self.name))),
        };
        let pairs = || self.outputs.chunks_exact(2).zip(emulated.chunks_exact(2));
        let differing = pairs().filter(|(ours, theirs)| ours != theirs).count();
        (differing > 0 || self.outputs.len() != emulated.len()).then(|| {
            let why = format!("{}: {differing} of {} half words differ", self.name, pairs().count());
            (Verdict::Failed, why)
        })
    }
}

/// The rungs of the engineer's log. Rungs with a race may give right or wrong outputs; these are noted but
/// not judged.
pub fn ladder<M: Machine>(
    machine: &mut M,
    arch: &Arch,
    settings: &Settings,
    progress: &mut dyn FnMut(&Check),
) -> Vec<Check> {
    let mut checks = Vec::new();
    for rung in rungs() {
        let races = rung.expected != Expected::Passed;
        let mut right = Making::new("ladder", rung.name);
        let mut wrong = 0;
        let small = [Problem::new(1, 1, 128, 64, DType::F16), Problem::new(2, 1, 64, 64, DType::F16)];
        for problem in small.map(|problem| problem.with_band(rung.mask)) {
            let bound = match rung.kernel.bind(&problem, arch) {
                Ok(bound) => bound,
                Err(error) => {
                    right.fail(error.to_string());
                    continue;
                }
            };
            for (seed, &style) in settings.styles.iter().enumerate().filter(|(_, s)| s.is_finite()) {
                let Some(feed) = Feed::draw(&bound, style, seed as u64 + 1) else { continue };
                right.check.cases += 1;
                let references = feed.references(&bound).ok().flatten();
                match trial(machine, &bound, &feed, references.as_deref()) {
                    Ok(outcome) if races => wrong += u32::from(!outcome.is_right()),
                    Ok(outcome) => {
                        outcome.reasons.iter().for_each(|r| right.fail(format!("{}: {r}", style.name())));
                    }
                    Err(error) => right.fail(format!("{}: {error}", style.name())),
                }
            }
        }
        let mut check = right.done();
        if races {
            check.notes.push(format!("it races: wrong in {wrong} of {} runs", check.cases));
        }
        progress(&check);
        checks.push(check);
    }
    checks
}

/// Repeated launches that must be bit-identical, with another kernel between each two.
pub fn repeats<M: Machine>(
    machine: &mut M,
    arch: &Arch,
    settings: &Settings,
    progress: &mut dyn FnMut(&Check),
) -> Vec<Check> {
    let mut checks = Vec::new();
    for &(dtype, dim, variants) in &settings.kinds {
        let shapes =
            [(1, 2, 300), (2, 3, 129)].map(|(batch, heads, seq)| Problem::new(batch, heads, seq, dim, dtype));
        for variant in settings.variants(variants) {
            let mut making = Making::new("repeats", variant.title(dtype, dim));
            let bounds: Vec<Bound> = shapes
                .iter()
                .filter_map(|problem| variant.plan(problem, arch))
                .filter_map(|(problem, plan)| bind(&plan, &problem, arch).ok())
                .collect();
            let feeds: Vec<Option<Feed>> = bounds.iter().map(|b| Feed::draw(b, Style::Normal, 7)).collect();
            let mut first: Vec<Option<Vec<u8>>> = vec![None; bounds.len()];
            for launch in 0..settings.repeats.min(FEW) {
                for (index, (bound, feed)) in bounds.iter().zip(&feeds).enumerate() {
                    let Some(feed) = feed else { continue };
                    making.check.cases += 1;
                    match trial(machine, bound, feed, None) {
                        Ok(outcome) => {
                            let outputs = outcome.outputs(bound);
                            if first[index].get_or_insert_with(|| outputs.clone()) != &outputs {
                                making.fail(format!(
                                    "launch {launch} of problem {index} differs from the first"
                                ));
                            }
                        }
                        Err(error) => making.fail(error.to_string()),
                    }
                }
            }
            if making.check.cases > 0 {
                checks.push(making.done());
                checks.last().into_iter().for_each(&mut *progress);
            }
        }
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn emulator() -> Emulator {
        let checks = Checks { races: false, uninitialised: false, unwritten: false };
        Emulator::new(Options { checks, ..Options::default() })
    }

    /// A machine that flips the last bit of every output, every third time.
    struct Flaky(Emulator, u32);

    impl Machine for Flaky {
        type Buffer = emu::Buffer;
        type Error = emu::EmuError;

        fn allocate(&mut self, bytes: usize) -> Result<emu::Buffer, emu::EmuError> {
            self.0.allocate(bytes)
        }

        fn upload(&mut self, buffer: &mut emu::Buffer, data: &[u8]) -> Result<(), emu::EmuError> {
            self.0.upload(buffer, data)
        }

        fn launch(
            &mut self,
            kernel: &ptx::Kernel,
            buffers: &mut [&mut emu::Buffer],
        ) -> Result<(), emu::EmuError> {
            self.1 += 1;
            self.0.launch(kernel, buffers)
        }

        fn download(&mut self, buffer: &emu::Buffer, data: &mut [u8]) -> Result<(), emu::EmuError> {
            self.0.download(buffer, data)?;
            if self.1.is_multiple_of(3) {
                let middle = (data.len() / 2) & !1;
                data[middle] ^= 1;
            }
            Ok(())
        }
    }

    fn tiny() -> Settings {
        Settings { kinds: vec![(DType::F16, 64, 2)], every: 6, repeats: 3, ..Settings::quick() }
    }

    #[test]
    fn the_emulator_passes() {
        let mut seen = 0;
        let mut count = |_: &Check| seen += 1;
        let mut checks = torture(&mut emulator(), &Arch::SM_90, &tiny(), &mut count);
        checks.extend(repeats(&mut emulator(), &Arch::SM_90, &tiny(), &mut count));
        let failed: Vec<_> = checks.iter().filter(|c| c.verdict != Verdict::Passed).collect();
        assert!(failed.is_empty(), "{failed:#?}");
        assert!(checks.len() == seen && seen > 6, "{seen} of {}", checks.len());
    }

    #[test]
    fn every_rung_that_should_be_right_is() {
        let settings = Settings { styles: vec![Style::Normal], ..tiny() };
        let checks = ladder(&mut emulator(), &Arch::SM_90, &settings, &mut |_| {});
        let failed: Vec<_> = checks.iter().filter(|c| c.verdict != Verdict::Passed).collect();
        assert!(failed.is_empty() && checks.len() == 14, "{failed:#?}");
    }

    #[test]
    fn a_machine_that_errs_now_and_then_is_refused() {
        let mut flaky = Flaky(emulator(), 0);
        let checks = torture(&mut flaky, &Arch::SM_90, &tiny(), &mut |_| {});
        assert!(checks.iter().any(|c| c.group == "emulator's bits" && c.verdict == Verdict::Failed));
        let checks = repeats(&mut flaky, &Arch::SM_90, &tiny(), &mut |_| {});
        assert!(checks.iter().all(|c| c.verdict == Verdict::Failed), "{checks:#?}");
    }
}
