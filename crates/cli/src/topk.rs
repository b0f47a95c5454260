//! The command `flashcore topk`: lists the best plans for a problem in the ledger.

use std::io::Write;
use std::path::Path;

use bench::provenance::Provenance;
use kernels::select::Shape;
use ledger::{Ledger, Ranked, TimeKind, Trial};
use serde_json::json;

use crate::args::Topk;
use crate::error::CliError;
use crate::{Status, choice, table, unless_closed};

pub fn topk(args: &Topk) -> Result<Status, CliError> {
    let problem =
        args.problem.as_ref().map(|problem| choice::parse_shape("--problem", problem)).transpose()?;
    let ledger = Ledger::read(&args.ledger.path)?;
    let (problem, device) = chosen(&ledger, problem, args.device.as_deref())?;
    let best = ledger.topk(&problem, &device, args.k)?;
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        out.json("topk", &json!(best)).map_err(CliError::from)
    } else {
        print(&mut out, &problem, &device, &best)
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

/// The problem and the device. One that is not given is the ledger's only one.
fn chosen(
    ledger: &Ledger,
    problem: Option<Shape>,
    device: Option<&str>,
) -> Result<(Shape, String), CliError> {
    let several = |argument, all: Vec<String>| CliError::Argument {
        argument,
        value: "(missing)".to_owned(),
        accepted: format!("one of {}", all.join("; ")),
    };
    let device = match device {
        Some(device) => device_name(device)?,
        None => match ledger.devices()?.as_slice() {
            [only] => only.clone(),
            all => return Err(several("--device", all.to_vec())),
        },
    };
    let problem = match problem {
        Some(problem) => problem,
        None => match ledger.best_of_problems(&device)?.as_slice() {
            [only] => only.problem,
            all => {
                return Err(several("--problem", all.iter().map(|best| best.problem.to_string()).collect()));
            }
        },
    };
    Ok((problem, device))
}

fn print(out: &mut impl Write, problem: &Shape, device: &str, best: &[Ranked]) -> Result<(), CliError> {
    let device = crate::terminal::one_line(device);
    if best.is_empty() {
        writeln!(out, "the ledger has no time for {problem} on {device}")?;
        return Ok(());
    }
    writeln!(out, "{problem} on {device}")?;
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
    Ok(())
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
    let fate = match (&r.rejected, r.promoted) {
        (_, true) => ", promoted".to_owned(),
        (Some(reason), false) => format!(", {reason}"),
        (None, false) => String::new(),
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
            rejected: None,
            promoted: false,
        };
        let best = [ranked(2, Trial::Race, 5.0, Some(race)), ranked(3, Trial::Microbench, 4.0, None)];
        let mut out = Vec::new();
        print(&mut out, &problem, "d", &best).unwrap();
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
        let predicted = lines(TimeKind::Predicted);
        assert_eq!(predicted[4], "predicted alone, not compared with another plan:");
        assert!(
            !predicted.concat().contains("raced") && !predicted.concat().contains("timing"),
            "{predicted:?}"
        );
    }
}
