//! The command `flashcore lab selftest`: compares a GPU with the emulator.

use std::ffi::OsString;
use std::io::Write;
use std::time::Duration;

use bench::provenance::Provenance;
use calibrate::selftest::{
    Check, SelfTestReport, Settings, arithmetic, attention, mutants, sanitizer, streams,
};
use check::gate::Verdict;
use driver::Gpu;
use emu::{Checks, Emulator, Options};
use host::store::{append_line, appendable};
use kernels::Arch;
use ptx::Machine;
use serde_json::json;

use crate::args::Selftest;
use crate::error::CliError;
use crate::terminal::aside;
use crate::{Status, unless_closed};

/// Time limit of one tool of compute-sanitizer.
const SANITIZER_LIMIT: Duration = Duration::from_secs(90);

pub fn selftest(args: &Selftest) -> Result<Status, CliError> {
    let mut settings = match (args.under_sanitizer, args.quick) {
        (true, _) => Settings::short(),
        (false, true) => Settings::quick(),
        (false, false) => Settings::thorough(),
    };
    if !args.family.is_empty() {
        settings.families.clone_from(&args.family);
    }
    args.evidence.as_deref().map_or(Ok(()), appendable)?;
    let mut log = Log { json: args.json, done: 0 };
    let (report, provenance) = if args.emulator {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let provenance = Provenance::of_cpu(std::path::Path::new("."), threads);
        if args.evidence.is_some() && provenance.commit.is_none() {
            return Err(CliError::Unclean);
        }
        (on_emulator(&settings, &mut log), provenance)
    } else {
        let mut gpu = Gpu::open(args.device)?;
        let provenance = Provenance::of_gpu(gpu.info());
        if args.evidence.is_some() && provenance.commit.is_none() {
            return Err(CliError::Unbuilt);
        }
        (on_gpu(&mut gpu, args, &settings, &mut log)?, provenance)
    };
    if let Some(path) = &args.evidence {
        append_line(path, &report.row(&settings, &provenance).to_string())?;
    }
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        let mut object = report.row(&settings, &provenance);
        object["checks"] = json!(report.checks);
        out.json("selftest", &object).map_err(CliError::from)
    } else {
        summary(&mut out, &report, &provenance)
    })?;
    Ok(match report.verdict() {
        Verdict::Passed => Status::Passed,
        Verdict::Failed => Status::Failed,
        Verdict::Incomplete => Status::Incomplete,
    })
}

/// Prints each check when it ends.
struct Log {
    json: bool,
    done: usize,
}

impl Log {
    fn check(&mut self, check: &Check) {
        self.done += 1;
        if self.json {
            return;
        }
        let Check { group, name, verdict, cases, notes, seconds } = check;
        aside(format_args!("{:>4} {verdict:<10} {group}: {name} ({cases}, {seconds:.1} s)", self.done));
        for note in notes {
            aside(format_args!("       {note}"));
        }
    }
}

/// The checks that run on a GPU and on the emulator.
fn on_machine<M: Machine>(
    machine: &mut M,
    arch: &Arch,
    settings: &Settings,
    report: &mut SelfTestReport,
    log: &mut Log,
) {
    let mut tell = |check: &Check| log.check(check);
    let target = arch.target();
    report.checks.extend(attention::torture(machine, arch, settings, &mut tell));
    report.checks.extend(attention::ladder(machine, arch, settings, &mut tell));
    report.checks.extend(attention::repeats(machine, arch, settings, &mut tell));
    if settings.mantissas > 0 {
        report.checks.extend(arithmetic::approximations(machine, target, arch.sm, settings, &mut tell));
    }
    if settings.fragments > 0 {
        report.checks.extend(arithmetic::tensor_cores(machine, target, arch.sm, settings, &mut tell));
    }
}

/// Runs the checks on the emulator, which tests the self-test itself without a GPU.
fn on_emulator(settings: &Settings, log: &mut Log) -> SelfTestReport {
    let mut report = SelfTestReport::default();
    let checks = Checks { races: false, uninitialised: false, unwritten: false };
    let mut emulator = Emulator::new(Options { checks, ..Options::default() });
    on_machine(&mut emulator, &Arch::SM_90, settings, &mut report, log);
    report.checks.extend(mutants::mutants(&Arch::SM_90, settings, &mut |check| log.check(check)));
    report
}

fn on_gpu(
    gpu: &mut Gpu,
    args: &Selftest,
    settings: &Settings,
    log: &mut Log,
) -> Result<SelfTestReport, CliError> {
    let sm = gpu.info().sm();
    let arch = Arch::of(sm).ok_or_else(|| CliError::Argument {
        argument: "--device",
        value: format!("{} ({}, sm_{sm})", args.device, gpu.info().name),
        accepted: Arch::ALL.map(|arch| format!("sm_{}", arch.sm)).join(", "),
    })?;
    let arch = Arch { multiprocessors: gpu.info().sms, ..arch };
    let mut report = SelfTestReport::default();
    if args.under_sanitizer {
        // The kernels that race on purpose are left out: the sanitizer would report their races.
        report.checks.extend(attention::torture(gpu, &arch, settings, &mut |check| log.check(check)));
        return Ok(report);
    }
    // The kernels with planted faults run in the emulator, on a second thread while the checks run on the
    // GPU.
    let faulty = std::thread::scope(|scope| {
        let faulty = scope.spawn(|| mutants::mutants(&arch, settings, &mut |_| ()));
        on_machine(gpu, &arch, settings, &mut report, log);
        faulty.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    for check in faulty {
        log.check(&check);
        report.checks.push(check);
    }
    report.checks.extend(streams::streams(gpu, &arch, settings, &mut |check| log.check(check)));
    if !args.no_sanitizer {
        let child = child(args)?;
        let child: Vec<&std::ffi::OsStr> = child.iter().map(OsString::as_os_str).collect();
        let checks = sanitizer::sanitize(&child, SANITIZER_LIMIT, &mut |check| log.check(check));
        report.checks.extend(checks);
    }
    Ok(report)
}

/// The arguments with which this program runs the short list under the sanitizer.
fn child(args: &Selftest) -> Result<Vec<OsString>, CliError> {
    let program = std::env::current_exe()?;
    let device = args.device.to_string();
    let rest = ["lab", "selftest", "--under-sanitizer", "--device", &device];
    let families = args.family.iter().flat_map(|family| ["--family", family.name()]);
    Ok(std::iter::once(program.into_os_string())
        .chain(rest.into_iter().chain(families).map(OsString::from))
        .collect())
}

fn summary(out: &mut impl Write, report: &SelfTestReport, provenance: &Provenance) -> Result<(), CliError> {
    writeln!(out, "{} ({})", provenance.device, provenance.driver)?;
    let rows: Vec<Vec<String>> = report
        .counts()
        .into_iter()
        .map(|(group, [checks, passed, cases])| {
            vec![group.to_owned(), format!("{passed} of {checks}"), cases.to_string()]
        })
        .collect();
    crate::table::print(out, &["", "checks passed", "cases"], &rows)?;
    for check in report.checks.iter().filter(|check| check.verdict != Verdict::Passed) {
        writeln!(out, "{} {}: {}", check.verdict, check.group, check.name)?;
        check.notes.iter().try_for_each(|note| writeln!(out, "  {note}"))?;
    }
    writeln!(out, "{}", report.verdict())?;
    Ok(())
}
