//! The command `flashcore topk`: lists the best plans for a problem in the ledger.

use std::io::Write;
use std::path::Path;

use bench::provenance::Provenance;
use kernels::select::Shape;
use ledger::{Ledger, Ranked, Reason, TimeKind, Trial};
use serde_json::json;

use crate::args::Topk;
use crate::error::CliError;
use crate::{Status, choice, table, unless_closed};

pub fn topk(args: &Topk) -> Result<Status, CliError> {
    let problem =
        args.problem.as_ref().map(|problem| choice::parse_shape("--problem", problem)).transpose()?;
    let ledger = Ledger::read(&args.ledger.path)?;
    let (problem, device, others) = chosen(&ledger, problem, args.device.as_deref())?;
    let best = ledger.topk(&problem, &device, args.k)?;
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        out.json("topk", &json!(best)).map_err(CliError::from)
    } else {
        print(&mut out, &problem, &device, &others, &best)
    })?;
    Ok(Status::Passed)
}

/// The name under which the ledger keeps `cpu`, `cuda` or `cuda:N` of this machine. Other names are returned
/// unchanged.
pub fn device_name(device: &str) -> Result<String, CliError> {
    match device.strip_prefix("cuda") {
        _ if device == "cpu" => {
            // The name ends with the number of threads, after a comma. The part before the comma matches any
            // number.
            let name = Provenance::of_cpu(Path::new("."), 1).device;
            Ok(name.rsplit_once(',').map_or(name.clone(), |(cpu, _)| cpu.to_owned()))
        }
        Some(number) if number.is_empty() || number.starts_with(':') => {
            let number = number.trim_start_matches(':');
            let ordinal = if number.is_empty() { Ok(0) } else { number.parse() };
            let ordinal = ordinal.map_err(|_| CliError::Argument {
                argument: "--device",
                value: device.to_owned(),
                accepted: "cpu, cuda, cuda:N, or the name of a device in the ledger".to_owned(),
            })?;
            Ok(driver::Gpu::open(ordinal)?.info().name.clone())
        }
        _ => Ok(device.to_owned()),
    }
}

/// The problem and the device, with the ledger's other devices if the device was not given. A problem that
/// is not given is the ledger's only one, and such a device is the only one, or the only one of this machine.
fn chosen(
    ledger: &Ledger,
    problem: Option<Shape>,
    device: Option<&str>,
) -> Result<(Shape, String, Vec<String>), CliError> {
    let (device, others) = match device {
        Some(device) => (device_name(device)?, Vec::new()),
        None => {
            let mut all = ledger.devices()?;
            if let Some(problem) = &problem {
                let best = all.iter().map(|device| ledger.topk(problem, device, 1));
                let known = best.collect::<Result<Vec<_>, _>>()?;
                if known.iter().any(|best| !best.is_empty()) {
                    let mut known = known.iter();
                    all.retain(|_| known.next().is_some_and(|best| !best.is_empty()));
                }
            }
            let gpus = driver::devices().unwrap_or_default().into_iter().map(|gpu| gpu.name);
            let here: Vec<String> = gpus.chain([device_name("cpu")?]).collect();
            default_device(all, &here).map_err(|all| several("--device", &all))?
        }
    };
    let problem = match problem {
        Some(problem) => problem,
        None => match ledger.best_of_problems(&device)?.as_slice() {
            [only] => only.problem,
            all => {
                let all: Vec<String> = all.iter().map(|best| best.problem.to_string()).collect();
                return Err(several("--problem", &all));
            }
        },
    };
    Ok((problem, device, others))
}

/// The only device of the ledger, or the only one with a name in `here`, and the ledger's others. `Err` has
/// all devices back.
fn default_device(mut all: Vec<String>, here: &[String]) -> Result<(String, Vec<String>), Vec<String>> {
    if all.len() == 1 {
        return Ok((all.remove(0), all));
    }
    let is_of = |device: &String, name: &String| device.starts_with(name.as_str());
    let found: Vec<&String> =
        here.iter().filter(|name| all.iter().any(|device| is_of(device, name))).collect();
    let [only] = found[..] else { return Err(all) };
    all.retain(|device| !is_of(device, only));
    Ok((only.clone(), all))
}

/// The error that asks for an option with one of the ledger's values.
fn several(argument: &'static str, all: &[String]) -> CliError {
    let why = match all {
        [] => "the ledger has no time yet".to_owned(),
        all => format!("the ledger has several; add one of:{}", options(argument, all)),
    };
    CliError::Missing { argument, why }
}

/// An option with each value, one per line, as a shell reads it.
fn options(argument: &str, values: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || ",.-_".contains(c);
    let line = |value: &String| match value.chars().all(plain) {
        true => format!("\n  {argument} {value}"),
        false => format!("\n  {argument} '{}'", crate::terminal::one_line(value).replace('\'', r"'\''")),
    };
    values.iter().map(line).collect()
}

fn print(
    out: &mut impl Write,
    problem: &Shape,
    device: &str,
    others: &[String],
    best: &[Ranked],
) -> Result<(), CliError> {
    let device = crate::terminal::one_line(device);
    if best.is_empty() {
        writeln!(out, "the ledger has no time for {problem} on {device}")?;
        return Ok(());
    }
    match others {
        [] => writeln!(out, "{problem} on {device}")?,
        _ => writeln!(
            out,
            "{problem} on {device}, this machine's; the ledger's others:{}",
            options("--device", others)
        )?,
    }
    let is_predicted = best.iter().any(|r| r.kind == TimeKind::Predicted);
    let (over, alone) = match is_predicted {
        true => ("over the plan of the comparison", "predicted alone, not compared with another plan:"),
        false => ("over the plan it raced", "only with a short timing, which is less certain:"),
    };
    let header = ["", "time µs", "interval", "by", over, "candidate", "from", "plan"];
    let rows: Vec<Vec<String>> = best.iter().enumerate().map(|(i, r)| line(i + 1, r)).collect();
    // A faster short timing may follow a slower race: it is a weaker statement.
    let is_raced = |r: &Ranked| r.trial != Trial::Microbench;
    let raced = best.iter().take_while(|r| is_raced(r)).count();
    let (first, rest) = rows.split_at(raced);
    if !first.is_empty() {
        table::print(out, &header, first)?;
    }
    if !first.is_empty() && !rest.is_empty() {
        writeln!(out, "\n{alone}")?;
    }
    if !rest.is_empty() {
        table::print(out, &header, rest)?;
    }
    let mut reasons: Vec<Reason> = best.iter().filter_map(reason).collect();
    reasons.sort_unstable();
    reasons.dedup();
    for (i, reason) in reasons.into_iter().enumerate() {
        let line = if i == 0 { "\n" } else { "" };
        writeln!(out, "{line}{reason}: {}", meaning(reason, is_predicted))?;
    }
    Ok(())
}

/// The reason in a candidate's line.
fn reason(ranked: &Ranked) -> Option<Reason> {
    ranked.rejected.filter(|_| !ranked.promoted)
}

/// A [reason](Reason::RANKED) that leaves a candidate in the ranking, in words.
fn meaning(reason: Reason, is_predicted: bool) -> &'static str {
    match (reason, is_predicted) {
        (Reason::Slower, true) => "not faster than the baseline, or than those that were compared with it",
        (Reason::Slower, false) => {
            "not faster than the baseline in a race, or than those that went to a race by short timings"
        }
        (Reason::Budget, true) => "the search ended before this one was compared with the baseline",
        (Reason::Budget, false) => "the search ended before this one's race",
        _ => "its time is not ranked",
    }
}

fn line(place: usize, r: &Ranked) -> Vec<String> {
    let trial = match (r.kind, r.trial) {
        _ if r.taken_over => "a short timing of an earlier run",
        (TimeKind::Predicted, _) => "the model (predicted)",
        (TimeKind::Measured, Trial::Microbench) => "a short timing",
        (TimeKind::Measured, Trial::Race) => "a race",
        (TimeKind::Measured, Trial::HeldOut) => "a held-out problem",
    };
    let against = match &r.against {
        Some(a) => {
            let time = r.incumbent_us.map_or(String::new(), |us| format!(" at {us:.2} µs"));
            let race = format!("{:.3}× ({:.3} … {:.3}) {}", a.ratio, a.low, a.high, a.verdict.name());
            format!("{race} over #{}{time}", a.incumbent.0)
        }
        None => "–".to_owned(),
    };
    let fate = match reason(r) {
        _ if r.promoted => ", promoted".to_owned(),
        Some(reason) => format!(", {reason}"),
        None => String::new(),
    };
    vec![
        place.to_string(),
        format!("{:.2}", r.us),
        format!("{:.2} … {:.2}", r.low_us, r.high_us),
        trial.to_owned(),
        against,
        format!("#{} of run {}{fate}", r.candidate.0, r.run.0),
        r.operator.to_string(),
        json!(r.subject).to_string(),
    ]
}

#[cfg(test)]
mod tests {
    use bench::SpeedVerdict;
    use ledger::{Against, Arm, Candidate, CandidateId, MadeBy, Operator, RunId};

    use super::*;

    /// The lines that `topk` prints of a race at 5 µs and of a faster time without one.
    fn lines(kind: TimeKind) -> Vec<String> {
        let race = Against {
            incumbent: CandidateId(1),
            ratio: 1.2,
            low: 1.1,
            high: 1.3,
            noise: 1.02,
            verdict: SpeedVerdict::Faster,
        };
        let problem = Shape::of(&problem::Problem::mission());
        let ranked = |candidate, trial, us, against| Ranked {
            candidate: CandidateId(candidate),
            run: RunId(1),
            problem,
            device: "d".to_owned(),
            subject: Candidate::Cpu(cpu::CpuPlan::for_threads(&problem::Problem::mission(), 1)),
            arm: Arm::Evolution,
            operator: MadeBy { operator: Operator::Random, detail: String::new() },
            kind,
            trial,
            taken_over: false,
            us,
            low_us: us,
            high_us: us,
            predicted_us: None,
            against,
            incumbent_us: Some(6.0),
            rejected: Some(if candidate == 2 { Reason::Slower } else { Reason::Budget }),
            promoted: false,
        };
        let best = [ranked(2, Trial::Race, 5.0, Some(race)), ranked(3, Trial::Microbench, 4.0, None)];
        let mut out = Vec::new();
        print(&mut out, &problem, "d", &[], &best).unwrap();
        String::from_utf8(out).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    fn faster_times_without_a_race_stand_apart() {
        let measured = lines(TimeKind::Measured);
        assert!(
            measured[1].contains("over the plan it raced") && measured[2].contains("FASTER"),
            "{measured:?}"
        );
        assert_eq!(measured[3..5], ["", "only with a short timing, which is less certain:"]);
        assert!(measured[6].contains("4.00"), "{measured:?}");
        assert_eq!(measured[7], "");
        assert!(measured[8].starts_with("budget: the search ended before this one's race"), "{measured:?}");
        assert!(measured[9].starts_with("slower: not faster than the baseline in a race"), "{measured:?}");
        let predicted = lines(TimeKind::Predicted);
        assert_eq!(predicted[4], "predicted alone, not compared with another plan:");
        assert!(
            !predicted.concat().contains("raced") && !predicted.concat().contains("timing"),
            "{predicted:?}"
        );
        assert!(predicted.concat().contains("slower: not faster than the baseline, or"), "{predicted:?}");
    }

    /// Without `--device` the ledger's device of this machine is taken; where that leaves a choice, the error
    /// lists every option.
    #[test]
    fn a_ledger_of_several_devices_is_read_for_this_machine() {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let of = |all: &[&str], here: &[&str]| default_device(owned(all), &owned(here));
        let cpu = ["Xeon, avx2, 2 threads", "Xeon, avx2, 8 threads"];
        assert_eq!(of(&["H200"], &["Xeon, avx2"]), Ok(("H200".to_owned(), owned(&[]))));
        assert_eq!(
            of(&[cpu[0], cpu[1], "H200"], &["L4", "Xeon, avx2"]),
            Ok(("Xeon, avx2".to_owned(), owned(&["H200"])))
        );
        for here in [&["L4"][..], &["H200", "Xeon, avx2"]] {
            assert_eq!(of(&[cpu[0], "H200"], here), Err(owned(&[cpu[0], "H200"])));
        }
        let said = several("--device", &owned(&["it's, 2 threads", "H200"])).to_string();
        assert_eq!(
            said,
            "missing --device: the ledger has several; add one of:\n  --device 'it'\\''s, 2 threads'\n  \
             --device H200"
        );
    }
}
