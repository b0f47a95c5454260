//! Plans that a search found for this machine, in a file in the user's configuration folder. The command, the
//! Rust API and the Python wheel read the file ([`chosen`]), so that later calls use the result of a search.
//!
//! The file is `plans.jsonl`, one JSON object per line ([`KeptPlan`]). A line that cannot be used causes a
//! warning, and calls use the default plan instead.

use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use problem::{Problem, Shape};
use serde::{Deserialize, Serialize};

use crate::CpuPlan;
use crate::plan::MAX_THREADS;

/// A plan that is kept for one problem on one processor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptPlan {
    /// The processor's name ([`processor`]).
    pub processor: String,
    /// Number of threads of the calls for which the plan was found.
    pub threads: usize,
    /// The problem for which the plan was found.
    pub problem: Shape,
    /// The plan.
    pub plan: CpuPlan,
    /// The speed-up of this plan over the plan that calls used before, as measured in a race: above 1, this
    /// plan is faster. `None` for a plan that was added by hand.
    pub speedup: Option<f64>,
    /// The origin of the plan.
    pub source: String,
    /// The time at which the plan was added, UTC, ISO 8601.
    pub when: String,
}

impl KeptPlan {
    /// Checks the plan independently of the machine.
    fn check(&self) -> Result<(), String> {
        let problem = self.problem.problem();
        if self.threads == 0 || self.threads > MAX_THREADS {
            return Err(format!("invalid value '{}' for threads: expected 1 to {MAX_THREADS}", self.threads));
        }
        if self.speedup.is_some_and(|ratio| !(ratio.is_finite() && ratio > 0.0)) {
            return Err("invalid value for speedup: expected a number above 0, or null".to_owned());
        }
        self.plan.check_fields(&problem).map_err(|error| error.to_string())
    }

    /// Whether calls on this processor with `threads` threads use the plan.
    pub fn is_for(&self, processor: &str, threads: usize) -> bool {
        self.processor == processor && self.threads == threads
    }

    fn is_of(&self, other: &KeptPlan) -> bool {
        (&self.processor, self.threads, self.problem) == (&other.processor, other.threads, other.problem)
    }
}

/// A line of the file: its text, and the plan or the reason why the line cannot be used.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    text: String,
    /// The line's number in the file, from 1 on.
    pub number: usize,
    /// The plan, or the reason why the line cannot be used.
    pub plan: Result<KeptPlan, String>,
}

/// The lines of a file of saved plans.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeptPlans {
    lines: Vec<Line>,
}

/// Maximum size of a file that is read, in bytes; real files are much smaller.
const LONGEST: u64 = 8 << 20;

impl KeptPlans {
    /// The file of this user: `plans.jsonl` in `FLASHCORE_CONFIG_DIR`, else in `flashcore` under
    /// `XDG_CONFIG_HOME`, else in `flashcore` under `.config` of the home folder (`APPDATA` on Windows).
    /// `None` if no such environment variable is set.
    pub fn file() -> Option<PathBuf> {
        let variable =
            |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        Some(folder_of(variable)?.join("plans.jsonl"))
    }

    /// Reads a file. A file that does not exist counts as empty.
    ///
    /// # Errors
    /// When the file cannot be read, is not a regular file, or is longer than 8 MiB.
    pub fn read(path: &Path) -> std::io::Result<KeptPlans> {
        match std::fs::metadata(path) {
            Ok(found) if !found.is_file() => return Err(std::io::Error::other("it is not a regular file")),
            Ok(_) => {}
            Err(error) => return if is_absent(&error) { Ok(KeptPlans::default()) } else { Err(error) },
        }
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(LONGEST + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > LONGEST {
            return Err(std::io::Error::other(format!("it is longer than {LONGEST} bytes")));
        }
        Ok(KeptPlans::parse(&String::from_utf8_lossy(&bytes)))
    }

    /// Parses the contents of a file. Empty lines are ignored.
    pub fn parse(text: &str) -> KeptPlans {
        let line = |(index, text): (usize, &str)| {
            let plan = serde_json::from_str(text).map_err(|error| error.to_string());
            let plan = plan.and_then(|plan: KeptPlan| plan.check().map(|()| plan));
            Line { text: text.to_owned(), number: index + 1, plan }
        };
        let lines = text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty());
        KeptPlans { lines: lines.map(line).collect() }
    }

    /// The contents of the file. Lines that cannot be used are kept unchanged: a newer version may have
    /// written them.
    pub fn text(&self) -> String {
        self.lines.iter().map(|line| format!("{}\n", line.text)).collect()
    }

    /// All lines, in the file's order.
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// Adds a plan, replacing the one for the same problem, processor and number of threads.
    ///
    /// # Errors
    /// The reason why the plan cannot be used.
    pub fn put(&mut self, plan: KeptPlan) -> Result<(), String> {
        plan.check()?;
        let text = serde_json::to_string(&plan).map_err(|error| error.to_string())?;
        self.lines.retain(|line| !line.plan.as_ref().is_ok_and(|kept| kept.is_of(&plan)));
        let number = self.lines.last().map_or(1, |line| line.number + 1);
        self.lines.push(Line { text, number, plan: Ok(plan) });
        Ok(())
    }

    /// Removes the lines for which `wanted` is true, and returns their number.
    pub fn remove(&mut self, wanted: impl Fn(&Line) -> bool) -> usize {
        let before = self.lines.len();
        self.lines.retain(|line| !wanted(line));
        before - self.lines.len()
    }
}

fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

/// The folder that the environment variables name.
fn folder_of(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    variable("FLASHCORE_CONFIG_DIR")
        .or_else(|| Some(variable("XDG_CONFIG_HOME").filter(|path| path.is_absolute())?.join("flashcore")))
        .or_else(|| Some(variable("HOME")?.join(".config").join("flashcore")))
        .or_else(|| Some(variable("APPDATA")?.join("flashcore")))
}

/// The name of this machine's processor, as the operating system reports it.
pub fn processor() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
    })
}

/// The plan of a call.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// The plan.
    pub plan: CpuPlan,
    /// The saved plan, if the call uses one.
    pub kept: Option<&'static KeptPlan>,
}

/// The plan for a call of `problem` on at most `threads` threads: the plan kept for the problem, the
/// processor and this number of threads, else the default ([`CpuPlan::for_threads`]).
///
/// Saved plans are for plain problems: sequences of one length, scores without softcap, sink and programs,
/// and no invariant. The file is read once, by the first call of the process.
pub fn chosen(problem: &Problem, threads: usize) -> Choice {
    let kept = user().get(problem, threads);
    let plan = kept.map_or_else(|| CpuPlan::for_threads(problem, threads), |kept| kept.plan);
    Choice { plan, kept }
}

/// The plans that can be used here, by problem and number of threads.
#[derive(Debug, Default)]
struct Usable(HashMap<(Shape, usize), KeptPlan>);

impl Usable {
    fn of(plans: &KeptPlans, processor: &str, mut warn: impl FnMut(usize, &str)) -> Usable {
        let mut usable = HashMap::new();
        for line in &plans.lines {
            match &line.plan {
                Err(why) => warn(line.number, why),
                Ok(kept) if kept.processor != processor => {}
                Ok(kept) => match kept.plan.check(&kept.problem.problem()) {
                    Err(why) => warn(line.number, &why.to_string()),
                    // The last line for a problem is used.
                    Ok(()) => drop(usable.insert((key(&kept.problem.problem()), kept.threads), kept.clone())),
                },
            }
        }
        Usable(usable)
    }

    fn get(&self, problem: &Problem, threads: usize) -> Option<&KeptPlan> {
        if self.0.is_empty() || !is_plain(problem) {
            return None;
        }
        self.0.get(&(key(problem), threads))
    }
}

/// The shape of a problem in its canonical form, so that equal work has one key. The CPU kernels compute f32
/// in full, with or without the switch for tf32.
fn key(problem: &Problem) -> Shape {
    let mut shape = Shape::of(&problem.canonical());
    shape.dtypes.tf32 = false;
    shape
}

fn is_plain(problem: &Problem) -> bool {
    let plain = problem.programs.is_empty() && problem.score.is_plain();
    plain && problem.lengths.is_even() && problem.pass.invariant().is_none()
}

/// The user's plans for this processor, read once. Lines that cannot be used are reported on standard error.
fn user() -> &'static Usable {
    static USER: OnceLock<Usable> = OnceLock::new();
    USER.get_or_init(|| {
        let Some(file) = KeptPlans::file() else { return Usable::default() };
        match KeptPlans::read(&file) {
            Ok(plans) if plans.lines.is_empty() => Usable::default(),
            Ok(plans) => {
                let mut faults = Vec::new();
                let usable = Usable::of(&plans, processor(), |line, why| faults.push((line, why.to_owned())));
                if let Some(warning) = warning(&file, &faults) {
                    eprintln!("flashcore: {warning}");
                }
                usable
            }
            Err(error) => {
                eprintln!("flashcore: {} is ignored: {error}", file.display());
                Usable::default()
            }
        }
    })
}

/// Lines that a warning names. `flashcore plans list` names all.
const NAMED: usize = 3;

/// Characters of a reason that a warning quotes.
const QUOTED: usize = 200;

/// A reason without characters that would steer the terminal, such as those of a strange key.
fn quoted(why: &str) -> String {
    let steers = |c: char| c.is_control() || c.escape_debug().len() > 2;
    let shown = |c: char| if steers(c) { c.escape_debug().collect() } else { c.to_string() };
    let rest = if why.chars().nth(QUOTED).is_some() { "…" } else { "" };
    why.chars().take(QUOTED).map(shown).collect::<String>() + rest
}

/// One warning about all lines that cannot be used.
fn warning(file: &Path, faults: &[(usize, String)]) -> Option<String> {
    let file = file.display();
    let named: Vec<String> =
        faults.iter().take(NAMED).map(|(line, why)| format!("line {line}: {}", quoted(why))).collect();
    match faults {
        [] => None,
        [(line, why)] => Some(format!("line {line} of {file} is ignored: {}", quoted(why))),
        faults if faults.len() <= NAMED => {
            Some(format!("{} lines of {file} are ignored: {}", faults.len(), named.join("; ")))
        }
        faults => Some(format!(
            "{} lines of {file} are ignored (`flashcore plans list` names all): {}; …",
            faults.len(),
            named.join("; ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use problem::{Band, DType, Layout};

    use super::*;
    use crate::Isa;

    fn kept(problem: &Problem, threads: usize, block_q: usize) -> KeptPlan {
        let plan = CpuPlan { block_q, ..CpuPlan::for_threads(problem, threads) };
        let (problem, speedup) = (Shape::of(problem), Some(1.25));
        let [processor, source, when] = ["here", "run 1", "2026-01-02T03:04:05Z"].map(str::to_owned);
        KeptPlan { processor, threads, problem, plan, speedup, source, when }
    }

    #[test]
    fn the_last_plan_of_a_problem_on_this_processor_counts() {
        let problem = Problem::new(1, 2, 64, 32, DType::F32);
        let (first, last) = (kept(&problem, 2, 16), kept(&problem, 2, 32));
        let elsewhere = KeptPlan { processor: "elsewhere".to_owned(), ..kept(&problem, 2, 48) };
        let mut plans = KeptPlans::default();
        for plan in [&first, &last, &elsewhere, &kept(&problem, 1, 8)] {
            plans.put(plan.clone()).unwrap();
        }
        assert_eq!((plans.lines().len(), KeptPlans::parse(&plans.text())), (3, plans.clone()));
        let usable = Usable::of(&plans, "here", |line, why| panic!("{line}: {why}"));
        assert_eq!(usable.get(&problem, 2), Some(&last));
        assert_eq!(usable.get(&problem, 1).map(|kept| kept.plan.block_q), Some(8));
        assert_eq!(usable.get(&problem, 3), None);
        // Two lines for one problem, as two programs may write at the same time.
        let twice = KeptPlans::parse(&format!("{}{}", plans.text(), serde_json::to_string(&first).unwrap()));
        assert_eq!(Usable::of(&twice, "here", |_, _| ()).get(&problem, 2), Some(&first));
        assert_eq!(plans.remove(|line| line.plan.as_ref().is_ok_and(|kept| kept.is_for("here", 2))), 1);
    }

    #[test]
    fn equal_work_has_one_key_and_other_work_none() {
        let problem = Problem::new(1, 2, 64, 32, DType::F32).with_band(Band::CAUSAL);
        let mut plans = KeptPlans::default();
        plans.put(kept(&problem, 2, 16)).unwrap();
        let usable = Usable::of(&plans, "here", |_, _| ());
        let top_left = problem.clone().with_band(Band::CAUSAL_TOP_LEFT);
        for same in [&problem, &problem.clone().with_layout(Layout::Bshd), &top_left] {
            assert!(usable.get(same, 2).is_some(), "{same:?}");
        }
        let mut capped = problem.clone();
        capped.score.softcap = Some(20.0);
        for other in [&problem.clone().with_band(Band::FULL), &capped] {
            assert_eq!(usable.get(other, 2), None, "{other:?}");
        }
    }

    #[test]
    fn a_damaged_line_costs_a_warning_and_nothing_else() {
        let problem = Problem::new(1, 2, 64, 32, DType::F32);
        let good = serde_json::to_string(&kept(&problem, 2, 16)).unwrap();
        let foreign = Isa::ALL.into_iter().find(|isa| !isa.is_available()).map(Isa::name);
        let foreign = foreign.map(|name| {
            let ours = serde_json::to_string(&CpuPlan::for_threads(&problem, 2).isa).unwrap();
            good.replace(&ours, &format!("\"{name}\""))
        });
        let damaged = [
            good[..good.len() / 2].to_owned(),
            good.replace("\"threads\":2", "\"threads\":0"),
            good.replace("\"block_q\":16", "\"block_q\":1000000"),
            good.replace("\"speedup\":1.25", "\"speedup\":-1"),
            good.replace("\"heads_kv\":2", "\"heads_kv\":7"),
            good.replace("\"when\"", "\"whenever\""),
            "\u{0}".to_owned(),
        ];
        for line in damaged.into_iter().chain(foreign) {
            assert_ne!(line, good);
            let plans = KeptPlans::parse(&format!("{line}\n\n{good}\n"));
            let mut warnings = Vec::new();
            let usable = Usable::of(&plans, "here", |line, why| warnings.push((line, why.to_owned())));
            assert!(usable.get(&problem, 2).is_some() && warnings.len() == 1, "{line}: {warnings:?}");
            // A damaged line is kept when another line is added.
            assert!(plans.text().starts_with(&line));
        }
        let mut plans = KeptPlans::default();
        assert!(plans.put(KeptPlan { threads: 0, ..kept(&problem, 2, 16) }).unwrap_err().contains("threads"));
    }

    #[test]
    fn many_damaged_lines_are_one_warning() {
        let fault = |line| (line, "no JSON".to_owned());
        let warned =
            |count| warning(Path::new("/c/plans.jsonl"), &(1..=count).map(fault).collect::<Vec<_>>());
        assert_eq!(warned(0), None);
        assert_eq!(warned(1).unwrap(), "line 1 of /c/plans.jsonl is ignored: no JSON");
        assert_eq!(
            warned(2).unwrap(),
            "2 lines of /c/plans.jsonl are ignored: line 1: no JSON; line 2: no JSON"
        );
        assert_eq!(
            warned(300).unwrap(),
            "300 lines of /c/plans.jsonl are ignored (`flashcore plans list` names all): line 1: no JSON; \
             line 2: no JSON; line 3: no JSON; …"
        );
        let strange = format!("unknown field `\u{1b}[2K\n\u{202e}é'{}`", "x".repeat(1 << 20));
        let warned = warning(Path::new("p"), &[(1, strange)]).unwrap();
        assert!(warned.contains("`\\u{1b}[2K\\n\\u{202e}é'xx") && warned.ends_with("x…"), "{warned}");
        assert!(warned.chars().count() < 300, "{warned}");
    }

    #[test]
    fn the_file_is_in_the_folder_that_the_environment_names() {
        let of = |set: &[(&str, &str)]| {
            folder_of(|name| set.iter().find(|(set, _)| *set == name).map(|(_, value)| PathBuf::from(value)))
        };
        let home = ("HOME", "/home/u");
        assert_eq!(of(&[("FLASHCORE_CONFIG_DIR", "/c"), home]), Some("/c".into()));
        assert_eq!(of(&[("XDG_CONFIG_HOME", "/x"), home]), Some("/x/flashcore".into()));
        assert_eq!(of(&[("XDG_CONFIG_HOME", "x"), home]), Some("/home/u/.config/flashcore".into()));
        assert_eq!((of(&[("APPDATA", "/a")]), of(&[])), (Some("/a/flashcore".into()), None));
    }

    #[test]
    fn what_is_no_file_has_no_plans() {
        let none = KeptPlans::read(Path::new("/no/such/folder/plans.jsonl")).unwrap();
        assert_eq!(none, KeptPlans::default());
        assert_eq!(KeptPlans::read(Path::new("/dev/null/plans.jsonl")).unwrap(), KeptPlans::default());
        assert!(KeptPlans::read(Path::new("/")).unwrap_err().to_string().contains("not a regular file"));
    }
}
