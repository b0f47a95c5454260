//! The command `flashcore emulate`: runs launches on memory that another program gives, and returns the
//! memory and the hazards. Requests come on standard input, answers go to standard output.

use std::collections::HashMap;
use std::io::{BufRead, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use check::gate::{CheckReport, GateError, Settings, Verdict, Watch, check_watched};
use check::given::{Given, GivenError, GivenLaunch};
use check::names::demangle;
use check::sources::{CommentError, Sources};
use host::panics::{Panic, contain};
use ptx::{LeftOut, Verified};
use serde_json::{Map, Value, json};

use crate::args::Emulate;
use crate::error::CliError;
use crate::findings::{self, Found};
use crate::unjudged::Unjudged;
use crate::{Status, terminal, unless_closed};

/// The number of modules that are kept between requests.
const KEPT: usize = 64;

/// Bytes of the longest header of a request; the PTX is in the header.
const LONGEST: u64 = 1 << 28;

/// Seconds for a launch whose request states no time.
const SECONDS: f64 = 600.0;

/// Answers requests until standard input ends.
pub fn emulate(_: &Emulate) -> Result<Status, CliError> {
    let mut input = std::io::stdin().lock();
    let mut modules = Modules::default();
    loop {
        let mut header = Vec::new();
        let read = input.by_ref().take(LONGEST).read_until(b'\n', &mut header);
        read.map_err(|source| CliError::Read { path: "-".into(), source })?;
        if header.is_empty() {
            return Ok(Status::Passed);
        }
        let request = Request::parse(&header).map_err(CliError::Request)?;
        let contents = request.read(&mut input)?;
        let started = Instant::now();
        let answer = contain(|| request.answer(contents, &mut modules));
        let answer = answer.unwrap_or_else(|panic| Err(RefusedLaunch::Internal(panic)));
        let answer = answer.unwrap_or_else(|refused| Answer::refused(&request.launch.entry, &refused));
        let written = answer.write(started.elapsed());
        if let Err(CliError::Output(error)) = &written
            && error.kind() == std::io::ErrorKind::BrokenPipe
        {
            return Ok(Status::Passed);
        }
        unless_closed(written)?;
    }
}

/// A request: a launch, and how it is run.
struct Request {
    launch: GivenLaunch,
    ptx: String,
    settings: Settings,
    limit: Duration,
}

impl Request {
    /// Reads the header, one line of JSON.
    fn parse(header: &[u8]) -> Result<Request, String> {
        let mut object: Map<String, Value> =
            serde_json::from_slice(header).map_err(|error| format!("expected an object of JSON: {error}"))?;
        let ptx = match object.remove("ptx") {
            Some(Value::String(text)) => text,
            _ => return Err("invalid or missing ptx: expected the text of a module".to_owned()),
        };
        let mut settings = match object.remove("checks") {
            None => Settings::once(),
            Some(checks) => match checks.as_str() {
                Some("once") => Settings::once(),
                Some("thorough") => Settings::on_given_memory(),
                Some("none") => Settings::unchecked(),
                _ => {
                    return Err(format!(
                        "invalid value {checks} for checks: expected once, thorough or none"
                    ));
                }
            },
        };
        settings.collectives_order = match object.remove("warp_order") {
            None => false,
            Some(order) => match order.as_str() {
                Some("check") => false,
                Some("assume") => true,
                _ => return Err(format!("invalid value {order} for warp_order: expected check or assume")),
            },
        };
        let limit = match object.remove("seconds") {
            None => Duration::from_secs_f64(SECONDS),
            Some(seconds) => seconds
                .as_f64()
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .filter(|limit| !limit.is_zero())
                .ok_or_else(|| format!("invalid value {seconds} for seconds: expected a positive number"))?,
        };
        let launch = serde_json::from_value(Value::Object(object)).map_err(|error| error.to_string())?;
        Ok(Request { launch, ptx, settings, limit })
    }

    /// Reads the contents of the buffers, which follow the header.
    fn read(&self, input: &mut impl Read) -> Result<Vec<Vec<u8>>, CliError> {
        let lengths = self.launch.contents().map_err(|error| CliError::Request(error.to_string()))?;
        let mut contents = Vec::with_capacity(lengths.len());
        for length in lengths {
            let mut bytes = Vec::with_capacity(length);
            let read = input.take(length as u64).read_to_end(&mut bytes);
            let read = read.map_err(|source| CliError::Read { path: "-".into(), source })?;
            if read < length {
                return Err(CliError::Request(format!(
                    "standard input ended after {read} of {length} bytes of a buffer"
                )));
            }
            contents.push(bytes);
        }
        Ok(contents)
    }

    fn answer(&self, contents: Vec<Vec<u8>>, modules: &mut Modules) -> Result<Answer, RefusedLaunch> {
        let module = modules.get(&self.ptx)?;
        let entry = &self.launch.entry;
        if let Some(left_out) = module.left_out.iter().find(|left_out| *left_out.function == **entry) {
            let unjudged =
                Unjudged::new(std::path::Path::new("the module"), left_out.clone(), &module.sources);
            return Err(RefusedLaunch::Unknown(Box::new(unjudged)));
        }
        let given = self.launch.bind(module.verified.clone(), contents)?;
        let allowed = module.sources.allowed(|_, _| Vec::new())?;
        let settings = Settings { allowed, by_the_letter: false, ..self.settings.clone() };
        let mut check = check_watched(&given.bound, &settings, &Watch::start(self.limit))?;
        let outputs = given.changed(std::mem::take(&mut check.outputs));
        let object = object(&given, &check, &module.sources).map_err(RefusedLaunch::Print)?;
        Ok(Answer { object, outputs })
    }
}

/// The modules of earlier requests by their text.
#[derive(Default)]
struct Modules(HashMap<String, Arc<Parsed>>);

struct Parsed {
    verified: Verified,
    left_out: Vec<LeftOut>,
    sources: Sources,
}

impl Modules {
    fn get(&mut self, ptx: &str) -> Result<Arc<Parsed>, RefusedLaunch> {
        if let Some(parsed) = self.0.get(ptx) {
            return Ok(Arc::clone(parsed));
        }
        let (module, left_out) =
            ptx::parse_known(ptx).map_err(|error| RefusedLaunch::Parse(Box::new(error)))?;
        let verified = module.verify().map_err(RefusedLaunch::Verify)?;
        let parsed = Arc::new(Parsed { verified, left_out, sources: Sources::new(ptx.to_owned(), None) });
        if self.0.len() == KEPT {
            self.0.clear();
        }
        self.0.insert(ptx.to_owned(), Arc::clone(&parsed));
        Ok(parsed)
    }
}

/// Why a launch did not run.
#[derive(Debug, thiserror::Error)]
enum RefusedLaunch {
    #[error("the PTX does not parse: {0}")]
    Parse(Box<ptx::ParseError>),
    #[error("the PTX is invalid: {0}")]
    Verify(ptx::Violations),
    #[error(transparent)]
    Unknown(Box<Unjudged>),
    #[error(transparent)]
    Comment(#[from] CommentError),
    #[error(transparent)]
    Given(#[from] GivenError),
    #[error(transparent)]
    Gate(#[from] GateError),
    #[error(transparent)]
    Print(CliError),
    #[error("{}", CliError::Internal(.0.clone()))]
    Internal(Panic),
}

impl RefusedLaunch {
    /// The name of the variant for programs.
    const fn kind(&self) -> &'static str {
        match self {
            RefusedLaunch::Parse(_) | RefusedLaunch::Verify(_) => "ptx",
            RefusedLaunch::Unknown(_) => "unknown_instruction",
            RefusedLaunch::Comment(_) => "comment",
            RefusedLaunch::Given(_) | RefusedLaunch::Gate(_) => "launch",
            RefusedLaunch::Print(_) | RefusedLaunch::Internal(_) => "internal",
        }
    }
}

/// An answer: an object, then the bytes of the buffers that changed.
struct Answer {
    object: Value,
    outputs: Vec<(usize, Vec<u8>)>,
}

impl Answer {
    fn refused(entry: &str, refused: &RefusedLaunch) -> Answer {
        let message = refused.to_string();
        let object = json!({
            "verdict": Verdict::Incomplete,
            "kernel": { "name": demangle(entry), "entry": entry },
            "reasons": [&message],
            "warnings": [],
            "hazards": [],
            "notes": [],
            "runs": 0,
            "steps": 0,
            "coverage": null,
            "printed": [],
            "text": format!("  {}\n", ptx::quote::words(&message)),
            "error": { "kind": refused.kind(), "message": message },
        });
        Answer { object, outputs: Vec::new() }
    }

    fn write(mut self, took: Duration) -> Result<(), CliError> {
        let outputs =
            self.outputs.iter().map(|(buffer, bytes)| json!({ "buffer": buffer, "bytes": bytes.len() }));
        self.object["outputs"] = outputs.collect();
        self.object["seconds"] = json!(took.as_secs_f64());
        let mut out = terminal::out();
        out.json("emulate", &self.object)?;
        for (_, bytes) in &self.outputs {
            out.data(bytes)?;
        }
        Ok(out.flush()?)
    }
}

/// The check of a launch as JSON.
fn object(given: &Given, check: &CheckReport, sources: &Sources) -> Result<Value, CliError> {
    let found = Found::in_sources(check, sources);
    let entry = &given.bound.kernel.entry;
    let printed = check.printed.iter();
    let printed = printed.map(|p| json!({ "thread": p.thread.to_string(), "text": p.text }));
    Ok(json!({
        "verdict": check.verdict,
        "kernel": { "name": demangle(entry), "entry": entry },
        "reasons": found.sentences(),
        "warnings": found.warnings,
        "hazards": findings::rows(&found.causes, false),
        "notes": findings::rows(&found.notes, false),
        "runs": check.runs,
        "steps": check.steps,
        "coverage": check.coverage.as_ref().map(check::gate::Coverage::percent),
        "printed": printed.collect::<Value>(),
        "text": terminal::text(|out| findings::print(out, &found))?,
        "error": null,
    }))
}
