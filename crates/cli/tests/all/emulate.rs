//! The command `emulate`: requests with the bytes of buffers through a pipe.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

/// Each of 64 threads adds one to its element of `x` and stores it to `out`.
const ADD: &str = ".version 7.0
.target sm_80
.address_size 64
.visible .entry add(.param .u64 x, .param .u64 out, .param .u32 n)
{
    .reg .pred %p<2>; .reg .b32 %r<5>; .reg .b64 %d<6>;
    ld.param.u64 %d1, [x];
    ld.param.u64 %d2, [out];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x;
    setp.ge.u32 %p1, %r2, %r1;
    @%p1 ret;
    mul.wide.u32 %d3, %r2, 4;
    add.s64 %d4, %d1, %d3;
    add.s64 %d5, %d2, %d3;
    ld.global.u32 %r3, [%d4];
    add.u32 %r4, %r3, 1;
    st.global.u32 [%d5], %r4;
    ret;
}
";

/// One thread follows the address in `table` and stores the number there behind the address.
const FOLLOW: &str = ".version 7.0
.target sm_80
.address_size 64
.visible .entry follow(.param .u64 table)
{
    .reg .b32 %r<2>; .reg .b64 %d<3>;
    ld.param.u64 %d1, [table];
    ld.global.u64 %d2, [%d1];
    ld.global.u32 %r1, [%d2];
    st.global.u32 [%d1+8], %r1;
    ret;
}
";

/// The command with its pipes.
struct Emulate {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Emulate {
    fn start() -> Emulate {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        let pipes =
            command.arg("emulate").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipes.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Emulate { child, output }
    }

    /// The answer to a request, as printed, and the buffers that follow it.
    fn ask(&mut self, request: &Value, contents: &[&[u8]]) -> (String, Vec<Vec<u8>>) {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{request}").unwrap();
        contents.iter().for_each(|bytes| input.write_all(bytes).unwrap());
        input.flush().unwrap();
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let read = |output: &Value| {
            let mut bytes = vec![0; output["bytes"].as_u64().unwrap() as usize];
            self.output.read_exact(&mut bytes).unwrap();
            bytes
        };
        (line, answer["outputs"].as_array().unwrap().iter().map(read).collect())
    }

    /// Ends the input, and returns the exit code and standard error.
    fn end(mut self) -> (Option<i32>, String) {
        drop(self.child.stdin.take());
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap().code(), said)
    }
}

/// A launch of `ADD` whose two buffers have 64 elements.
fn add(threads: u32, n: u32) -> Value {
    json!({
        "ptx": ADD, "entry": "add",
        "launch": { "grid": [1, 1, 1], "cluster": [1, 1, 1], "block": [threads, 1, 1], "dynamic_shared": 0 },
        "buffers": [
            { "name": "x", "bytes": 256, "initialised": true }, { "name": "out", "bytes": 256, "initialised": false },
        ],
        "args": [
            { "buffer": { "index": 0, "offset": 0 } }, { "buffer": { "index": 1, "offset": 0 } }, { "u32": n },
        ],
    })
}

fn words(numbers: impl Iterator<Item = u32>) -> Vec<u8> {
    numbers.flat_map(u32::to_le_bytes).collect()
}

/// Answers of each kind, for the test of schemas.
pub fn answers() -> String {
    let mut emulate = Emulate::start();
    let x = words(0..64);
    let mut unknown = add(64, 64);
    unknown["ptx"] = json!(ADD.replace("add.u32 ", "frobnicate.u32 "));
    let printed = [add(64, 64), add(128, 128), unknown].map(|request| emulate.ask(&request, &[&x]).0);
    printed.concat()
}

#[test]
fn results_and_hazards_come_back() {
    let mut emulate = Emulate::start();
    let x = words(0..64);
    for checks in ["once", "thorough", "none"] {
        let mut request = add(64, 64);
        request["checks"] = json!(checks);
        let (line, outputs) = emulate.ask(&request, &[&x]);
        let answer: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(answer["verdict"], "passed", "{line}");
        assert_eq!(answer["outputs"], json!([{ "buffer": 1, "bytes": 256 }]));
        assert_eq!(outputs, [words(1..65)]);
        // The kernel has nothing whose order could matter, so several schedules are several runs of it.
        assert_eq!(answer["runs"].as_u64().unwrap() > 1, checks == "thorough", "{line}");
    }
    // 128 threads on 64 elements; without checks this is found too.
    for checks in ["once", "none"] {
        let mut request = add(128, 128);
        request["checks"] = json!(checks);
        let (line, _) = emulate.ask(&request, &[&x]);
        let answer: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            (&answer["verdict"], &answer["hazards"][0]["kind"]),
            (&json!("failed"), &json!("out_of_bounds"))
        );
        assert!(answer["text"].as_str().unwrap().contains("cure:"), "{line}");
    }
    // A race: all threads store to the first element, the loads of which are equal.
    let mut race = add(64, 64);
    race["ptx"] = json!(ADD.replace("add.s64 %d5, %d2, %d3;", "mov.b64 %d5, %d2;"));
    let (line, _) = emulate.ask(&race, &[&x]);
    let answer: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(answer["hazards"][0]["kind"], "race", "{line}");
    race["checks"] = json!("none");
    let (line, _) = emulate.ask(&race, &[&x]);
    assert!(line.contains("\"verdict\":\"passed\""), "races are not looked for without checks: {line}");
    assert_eq!(emulate.end(), (Some(0), String::new()));
}

#[test]
fn addresses_in_memory_lead_to_buffers() {
    let mut emulate = Emulate::start();
    let request = json!({
        "ptx": FOLLOW, "entry": "follow",
        "launch": { "grid": [1, 1, 1], "cluster": [1, 1, 1], "block": [1, 1, 1], "dynamic_shared": 0 },
        "buffers": [
            { "name": "table", "bytes": 16, "initialised": true }, { "name": "x", "bytes": 8, "initialised": true },
        ],
        "addresses": [{ "buffer": 0, "at": 0, "to": 1, "offset": 4 }],
        "args": [{ "buffer": { "index": 0, "offset": 0 } }],
    });
    let (line, outputs) = emulate.ask(&request, &[&[7; 16], &words([5, 42].into_iter())]);
    assert!(line.contains("\"verdict\":\"passed\""), "{line}");
    // The address is the caller's again.
    assert_eq!(outputs, [[&[7; 8][..], &[42, 0, 0, 0], &[7; 4]].concat()]);
}

#[test]
fn launches_that_cannot_run_have_answers() {
    let mut emulate = Emulate::start();
    let x = words(0..64);
    let right = add(64, 64);
    let edited = |key: &str, value: Value| {
        let mut request = right.clone();
        request[key] = value;
        request
    };
    let address = |at: usize, to: usize| json!([{ "buffer": 0, "at": at, "to": to, "offset": 0 }]);
    for (request, kind, words) in [
        (
            edited("ptx", json!(ADD.replace("add.u32 ", "frobnicate.u32 "))),
            "unknown_instruction",
            "frobnicate",
        ),
        (edited("ptx", json!("nonsense")), "ptx", "does not parse"),
        (edited("ptx", json!(ADD.replace("%r4, %r3, 1", "%d1, %r3, 1"))), "ptx", "the PTX is invalid"),
        (edited("args", json!([])), "launch", "gives 0 arguments"),
        (edited("entry", json!("sub")), "launch", "sub"),
        (edited("addresses", address(256, 1)), "launch", "invalid value '256' for addresses[0].at"),
        (
            edited("addresses", address(0, 2)),
            "launch",
            "invalid value '2' for addresses[0].to: expected a buffer below 2",
        ),
    ] {
        let (line, outputs) = emulate.ask(&request, &[&x]);
        let answer: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(
            (&answer["verdict"], &answer["error"]["kind"]),
            (&json!("incomplete"), &json!(kind)),
            "{line}"
        );
        assert!(answer["error"]["message"].as_str().unwrap().contains(words), "{words}: {line}");
        assert!(outputs.is_empty());
    }
    let (line, _) = emulate.ask(&right, &[&x]);
    assert!(line.contains("\"verdict\":\"passed\""), "the next launch runs: {line}");
}

#[test]
fn requests_that_cannot_be_read_end_the_command() {
    let big = json!([{ "name": "x", "bytes": u64::MAX, "initialised": true }]);
    for (header, words) in [
        ("{}".to_owned(), "invalid or missing ptx"),
        ("[1]".to_owned(), "expected an object of JSON"),
        (
            json!({ "ptx": "", "checks": "most" }).to_string(),
            "invalid value \"most\" for checks: expected once",
        ),
        (json!({ "ptx": "", "warp_order": 1 }).to_string(), "invalid value 1 for warp_order"),
        (json!({ "ptx": "", "seconds": -1 }).to_string(), "invalid value -1 for seconds"),
        (json!({ "ptx": "", "entry": "k", "lunch": 1 }).to_string(), "unknown field `lunch`"),
        (add(64, 64).to_string(), "standard input ended after 0 of 256 bytes"),
        (
            {
                let mut request = add(64, 64);
                request["buffers"] = big;
                request.to_string()
            },
            "for buffers: expected at most",
        ),
    ] {
        let mut emulate = Emulate::start();
        writeln!(emulate.child.stdin.as_mut().unwrap(), "{header}").unwrap();
        let (code, said) = emulate.end();
        assert_eq!(code, Some(3), "{said}");
        assert!(said.contains("invalid request: ") && said.contains(words), "{words}: {said}");
    }
}
