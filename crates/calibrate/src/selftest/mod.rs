//! The self-test: compares the emulator's behaviour with a machine that is not the emulator.
//!
//! - [`attention`]: the gate's torture set on every plan family, judged like the emulator's runs; the
//!   machine's outputs against the emulator's, bit for bit; and repetitions that must be bit-identical.
//! - [`arithmetic`]: tensor cores and approximations, bit for bit where the emulator claims to be exact.
//! - [`mutants`]: kernels with an inserted fault, which the gate must reject (in the emulator alone).
//! - [`streams`]: the same launch on several streams at once (GPU only).
//! - [`sanitizer`]: a short list under NVIDIA's compute-sanitizer, where it is installed (GPU only).
//!
//! All but the last two run on any [`Machine`](ptx::Machine), so that this crate's tests run them on the
//! emulator.

pub mod arithmetic;
pub mod attention;
pub mod mutants;
mod plans;
pub mod sanitizer;
pub mod streams;

use std::collections::BTreeMap;
use std::time::Instant;

use kernels::Family;
use plans::Variant;
use problem::{DType, PassKind};
use serde::Serialize;
use serde_json::{Value, json};

use bench::provenance::Provenance;
use check::gate::Verdict;
use judge::inputs::Style;

/// The extent of a self-test.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub families: Vec<Family>,
    /// Element types and head dimensions of the torture set, each with the number of plan variations to try,
    /// the default included.
    pub kinds: Vec<(DType, usize, usize)>,
    pub styles: Vec<Style>,
    /// Every n-th problem of the torture set is used.
    pub every: usize,
    /// Input styles for which the outputs of machine and emulator must be bit-identical.
    pub bit_styles: Vec<Style>,
    /// Rounds of launches on several streams that must be bit-identical, for a family's default plan. At most
    /// [`FEW`] rounds for its variations, and for launches that are each given new inputs and judged
    /// separately.
    pub repeats: u32,
    /// Random fragments for each tensor-core instruction.
    pub fragments: u64,
    /// Mantissas per sign and exponent for each approximation.
    pub mantissas: u32,
    /// Every n-th site of a fault is used; none if 0.
    pub mutants: usize,
}

impl Settings {
    /// A self-test that takes minutes on a GPU.
    pub fn thorough() -> Settings {
        Settings {
            families: Family::of_pass(PassKind::Forward).collect(),
            kinds: vec![
                (DType::F16, 64, usize::MAX),
                (DType::Bf16, 64, 4),
                (DType::F16, 128, 8),
                (DType::Bf16, 128, 4),
                (DType::F16, 80, 4),
                (DType::F16, 256, 4),
                (DType::Bf16, 512, 4),
                (DType::F16, 59, 3),
                (DType::F32, 64, 4),
                (DType::F32, 128, 2),
            ],
            styles: Style::ALL.to_vec(),
            every: 1,
            bit_styles: vec![Style::Normal, Style::Rising, Style::NearTies],
            repeats: 1000,
            fragments: 32_768,
            mantissas: 16_384,
            mutants: 1,
        }
    }

    /// A self-test that takes seconds on a GPU.
    pub fn quick() -> Settings {
        Settings {
            families: Family::of_pass(PassKind::Forward).collect(),
            kinds: vec![(DType::F16, 64, 3), (DType::Bf16, 128, 3)],
            styles: vec![Style::Normal, Style::Rising, Style::Spike, Style::PoisonedPadding, Style::Outlier],
            every: 3,
            bit_styles: vec![Style::Normal],
            repeats: 20,
            fragments: 1024,
            mantissas: 512,
            mutants: 5,
        }
    }

    /// The first `count` variations of each family's plan.
    fn variants(&self, count: usize) -> Vec<Variant> {
        Variant::first(count).into_iter().filter(|variant| self.families.contains(&variant.family)).collect()
    }

    /// A list short enough for the slow sanitizer: one or two problems of each kind.
    pub fn short() -> Settings {
        Settings {
            families: Family::of_pass(PassKind::Forward).collect(),
            kinds: vec![(DType::F16, 64, 5), (DType::Bf16, 128, 2)],
            styles: vec![Style::Normal],
            every: 7,
            bit_styles: Vec::new(),
            repeats: 2,
            fragments: 0,
            mantissas: 0,
            mutants: 0,
        }
    }
}

/// Number of repetitions where a thousand would take minutes.
pub const FEW: u32 = 24;

/// One check of the self-test.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Check {
    /// The part of the self-test.
    pub group: &'static str,
    pub name: String,
    /// Passed, failed, or incomplete.
    pub verdict: Verdict,
    /// Number of cases, fragments, inputs or launches.
    pub cases: u64,
    /// The first few findings in words.
    pub notes: Vec<String>,
    /// Duration, s.
    pub seconds: f64,
}

/// Maximum number of findings that a check keeps.
const NOTES: usize = 4;

/// A check in progress.
struct Making {
    check: Check,
    start: Instant,
    more: u64,
}

impl Making {
    fn new(group: &'static str, name: impl Into<String>) -> Making {
        let check = Check {
            group,
            name: name.into(),
            verdict: Verdict::Passed,
            cases: 0,
            notes: Vec::new(),
            seconds: 0.0,
        };
        Making { check, start: Instant::now(), more: 0 }
    }

    fn fail(&mut self, why: String) {
        self.find(Verdict::Failed, why);
    }

    fn find(&mut self, verdict: Verdict, why: String) {
        self.check.verdict = self.check.verdict.max(verdict);
        if self.check.notes.len() < NOTES { self.check.notes.push(why) } else { self.more += 1 }
    }

    fn done(mut self) -> Check {
        if self.check.cases == 0 {
            self.find(Verdict::Incomplete, "no case was run".to_owned());
        }
        if self.more > 0 {
            self.check.notes.push(format!("and {} more", self.more));
        }
        self.check.seconds = self.start.elapsed().as_secs_f64();
        self.check
    }
}

/// The results of a self-test.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SelfTestReport {
    /// The checks in order.
    pub checks: Vec<Check>,
}

impl SelfTestReport {
    /// The worst verdict; incomplete when nothing was checked.
    pub fn verdict(&self) -> Verdict {
        self.checks.iter().map(|check| check.verdict).max().unwrap_or(Verdict::Incomplete)
    }

    /// Checks that did not pass, as `group: name`.
    pub fn failures(&self) -> Vec<String> {
        let failed = self.checks.iter().filter(|check| check.verdict != Verdict::Passed);
        failed.map(|check| format!("{}: {}", check.group, check.name)).collect()
    }

    /// By group: number of checks, of passed checks, and of cases.
    pub fn counts(&self) -> BTreeMap<&'static str, [u64; 3]> {
        let mut counts = BTreeMap::new();
        for check in &self.checks {
            let [all, passed, cases] = counts.entry(check.group).or_insert([0; 3]);
            *all += 1;
            *passed += u64::from(check.verdict == Verdict::Passed);
            *cases += check.cases;
        }
        counts
    }

    /// The evidence row of a self-test with these settings.
    pub fn row(&self, settings: &Settings, provenance: &Provenance) -> Value {
        let groups: BTreeMap<_, _> = self
            .counts()
            .into_iter()
            .map(|(group, [checks, passed, cases])| {
                (group, json!({ "checks": checks, "passed": passed, "cases": cases }))
            })
            .collect();
        let notes: BTreeMap<String, &Vec<String>> = self
            .checks
            .iter()
            .filter(|check| !check.notes.is_empty())
            .map(|check| (format!("{}: {}", check.group, check.name), &check.notes))
            .collect();
        let mut row = json!({
            "suite": "selftest", "impl": "flashcore", "verdict": self.verdict(), "groups": groups,
            "families": settings.families.iter().map(|family| family.name()).collect::<Vec<_>>(),
            "failures": self.failures(), "notes": notes,
            "seconds": self.checks.iter().map(|check| check.seconds).sum::<f64>().round(),
        });
        if let (Value::Object(row), Value::Object(part)) = (&mut row, json!(provenance)) {
            row.extend(part);
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_fails_closed_and_names_what_failed() {
        assert_eq!(SelfTestReport::default().verdict(), Verdict::Incomplete);
        let mut right = Making::new("attention", "one");
        right.check.cases = 5;
        let mut wrong = Making::new("attention", "two");
        wrong.check.cases = 9;
        for i in 0..7 {
            wrong.fail(format!("case {i}"));
        }
        let report = SelfTestReport {
            checks: vec![right.done(), wrong.done(), Making::new("streams", "three").done()],
        };
        assert_eq!(report.verdict(), Verdict::Failed);
        assert_eq!(report.failures(), ["attention: two", "streams: three"]);
        assert_eq!(report.counts()["attention"], [2, 1, 14]);
        assert_eq!(report.checks[1].notes.last().unwrap(), "and 3 more");
        assert_eq!(report.checks[2].verdict, Verdict::Incomplete);
        let row = report.row(&Settings::quick(), &Provenance::of_cpu(std::path::Path::new("."), 1));
        assert_eq!(row["families"], json!(["mma", "wgmma", "small_streamed", "small_at_once"]));
        assert_eq!((&row["suite"], &row["groups"]["attention"]["cases"]), (&json!("selftest"), &json!(14)));
    }
}
