//! Tests with child processes that write a ledger and are killed. Every acknowledged fact is stored once, and
//! the ledger stays intact.

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::Value;

use super::tests::{add, begin, new, outcome, screened, timed};
use super::{Arm, CandidateId, Ledger, LedgerError, RunId, Trial};
use crate::Stage;
use host::store::Scratch;

/// Environment variables for the child: the path of the ledger, and a name that its candidates contain.
const LEDGER: &str = "FLASHCORE_TEST_LEDGER";
const NAME: &str = "FLASHCORE_TEST_NAME";

/// The child process of the tests below, not a test of its own. It adds facts until it is killed or the
/// ledger returns an error, and prints each commit.
#[test]
fn child() {
    let (Ok(path), Ok(name)) = (std::env::var(LEDGER), std::env::var(NAME)) else { return };
    let written = (|| -> Result<(), LedgerError> {
        let ledger = Ledger::open(Path::new(&path))?;
        let run = match ledger.runs()?.pop() {
            Some(first) => first.id,
            None => begin(&ledger),
        };
        // Outcomes from before the crash are stored again and must not count twice.
        for known in ledger.candidates(run, CandidateId(0), usize::MAX)?.iter().rev().take(2) {
            tell(&ledger, known.id)?;
        }
        for i in 0.. {
            let candidate = ledger.add_candidate(&new(run, &format!("{name}-{i}"), Arm::Evolution, &[]))?;
            println!("\ncandidate {}", candidate.0);
            tell(&ledger, candidate)?;
        }
        Ok(())
    })();
    println!("\nerror {}", written.unwrap_err());
}

fn tell(ledger: &Ledger, candidate: CandidateId) -> Result<(), LedgerError> {
    ledger.tell(&outcome(candidate, Stage::Screen, screened(&format!("p{}", candidate.0), 10.0)))?;
    println!("\nscreen {}", candidate.0);
    let us = 5.0 + (candidate.0 % 17) as f64;
    ledger.tell(&outcome(candidate, Stage::Microbench, timed(Trial::Microbench, us, None)))?;
    println!("\nmicrobench {}", candidate.0);
    Ok(())
}

fn spawn(path: &Path, name: &str, limit: Option<u32>) -> Child {
    let test = std::env::current_exe().unwrap();
    let mut command = match limit {
        // The limit is in blocks of 512 bytes. With SIGXFSZ ignored, a write beyond the limit fails with
        // EFBIG.
        Some(blocks) => {
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\""), "sh"]).arg(test);
            shell
        }
        None => Command::new(test),
    };
    command
        .args(["crash::child", "--exact", "--nocapture", "--test-threads=1"])
        .env(LEDGER, path)
        .env(NAME, name)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// The acknowledged facts: kind and candidate. The last line may be incomplete.
fn acknowledged(lines: &str) -> Vec<(String, i64)> {
    let whole = lines.rfind('\n').map_or("", |end| &lines[..end]);
    let facts = whole.lines().filter_map(|line| line.split_once(' '));
    let facts = facts.filter(|(kind, _)| ["candidate", "screen", "microbench"].contains(kind));
    facts.filter_map(|(kind, n)| Some((kind.to_owned(), n.parse().ok()?))).collect()
}

/// Starts several children and kills each of them after a while.
fn killed(path: &Path, round: usize, children: usize, rng: &mut SmallRng) -> Vec<(String, i64)> {
    let lines = (0..children)
        .map(|child| {
            let mut child = spawn(path, &format!("{round}-{child}"), None);
            let mut out = BufReader::new(child.stdout.take().unwrap());
            let mut text = String::new();
            while !text.contains("microbench") {
                assert!(out.read_line(&mut text).unwrap() > 0, "{text}");
            }
            (child, out, text)
        })
        .collect::<Vec<_>>();
    std::thread::sleep(Duration::from_micros(rng.random_range(0..20_000)));
    lines
        .into_iter()
        .flat_map(|(mut child, mut out, mut text)| {
            child.kill().unwrap();
            child.wait().unwrap();
            std::io::Read::read_to_string(&mut out, &mut text).unwrap();
            acknowledged(&text)
        })
        .collect()
}

#[test]
fn what_was_acknowledged_survives_every_kill_and_nothing_is_there_twice() {
    const ROUNDS: usize = 24;
    let folder = Scratch::new().unwrap();
    let path = folder.path("flashcore.ledger");
    let mut rng = SmallRng::seed_from_u64(9);
    let mut told: HashSet<(String, i64)> = HashSet::new();
    for round in 0..ROUNDS {
        let children = 1 + usize::from(round % 4 == 3);
        told.extend(killed(&path, round, children, &mut rng));
        let ledger = Ledger::open(&path).unwrap();
        let found = ledger.check().unwrap();
        assert!(found.is_sound(), "round {round}: {found:?}");
        let kept = kept(&ledger);
        let lost: Vec<_> = told.difference(&kept).collect();
        assert!(lost.is_empty(), "round {round}: {lost:?}");
        // A child may have been killed between a commit and its acknowledgement.
        assert!(kept.len() - told.len() <= children, "round {round}: {} unheard", kept.len() - told.len());
        told = kept;
    }
    assert!(told.len() > 3 * ROUNDS, "{}", told.len());
}

/// Every fact of the ledger. Fails if a candidate is stored twice.
fn kept(ledger: &Ledger) -> HashSet<(String, i64)> {
    let run = RunId(1);
    assert_eq!(ledger.runs().unwrap().len(), 1);
    let candidates = ledger.candidates(run, CandidateId(0), usize::MAX).unwrap();
    let texts: HashSet<String> = candidates.iter().map(|c| c.new.candidate.hash()).collect();
    assert_eq!(texts.len(), candidates.len(), "a candidate twice");
    let mut facts: HashSet<(String, i64)> =
        candidates.iter().map(|c| ("candidate".to_owned(), c.id.0)).collect();
    for (_, outcome) in ledger.outcomes(run, 0, usize::MAX).unwrap() {
        let stage = serde_json::to_value(outcome.stage).unwrap();
        let Value::String(stage) = stage else { panic!("{stage}") };
        assert!(facts.insert((stage, outcome.candidate.0)), "{outcome:?} twice");
    }
    facts
}

#[test]
fn a_disk_that_fills_up_is_told_and_what_came_before_is_kept() {
    let folder = Scratch::new().unwrap();
    let path = folder.path("flashcore.ledger");
    begin(&Ledger::open(&path).unwrap());
    let child = spawn(&path, "full", Some(1200));
    let output = child.wait_with_output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let error = lines.lines().find_map(|line| line.strip_prefix("error "));
    assert!(error.is_some_and(|e| e.contains("no space for another fact")), "{lines}");
    let told = acknowledged(&lines);
    let ledger = Ledger::open(&path).unwrap();
    assert!(ledger.check().unwrap().is_sound());
    assert_eq!(told.into_iter().collect::<HashSet<_>>(), kept(&ledger));
    // Once there is free space, the ledger accepts writes again.
    add(&ledger, RunId(1), "after", Arm::Evolution, &[]);
}
