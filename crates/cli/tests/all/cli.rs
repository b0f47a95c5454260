//! Runs the built command on good and bad input and checks exit codes, messages and files.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::folder::{Folder, text};

/// A kernel that adds one to each of 64 numbers. `BARRIER` marks the place where the exchange through shared
/// memory needs a barrier.
pub const PTX: &str = ".version 7.0
.target sm_80
.address_size 64
.visible .entry shift(.param .u64 data)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    .shared .align 256 .b32 tile[64];
    ld.param.u64 %rd1, [data];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r2, [%rd3];
    shl.b32 %r3, %r1, 2;
    mov.u32 %r4, tile;
    add.u32 %r3, %r3, %r4;
    st.shared.u32 [%r3], %r2;
    BARRIER
    xor.b32 %r3, %r3, 128;
    ld.shared.u32 %r5, [%r3];
    st.global.u32 [%rd3], %r5;
    ret;
}
";

pub const LAUNCH: &str = "[launch]
grid = [1]
block = [64]
[[arg]]
role = \"buffer\"
dtype = \"u32\"
elements = 64
init = \"iota\"
";

#[test]
fn check_passes_fails_and_gives_up_with_its_exit_codes() {
    let folder = Folder::new("check");
    let launch = folder.write("launch.toml", LAUNCH);
    let right = folder.write("right.ptx", &PTX.replace("BARRIER", "bar.sync 0;"));
    let output = folder.run(&["check", &right, "--launch", &launch]);
    assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
    assert!(text(&output.stdout).starts_with("passed"));

    let racy = folder.write("racy.ptx", &PTX.replace("BARRIER", ""));
    let output = folder.run(&["check", &racy, "--launch", &launch, "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["verdict"], "failed");
    let hazard = &json["hazards"][0];
    assert_eq!(hazard["kind"], "race");
    assert_eq!(
        (hazard["text"].as_str(), hazard["other_text"].as_str()),
        (Some("st.shared.u32 [%r3], %r2;"), Some("ld.shared.u32 %r5, [%r3];"))
    );
    for key in ["line", "other_line", "threads", "address", "message"] {
        assert!(!hazard[key].is_null(), "{key} is missing: {hazard}");
    }
    assert_eq!((hazard["line"].as_u64(), hazard["other_line"].as_u64()), (Some(18), Some(21)));
    for key in ["error", "findings", "counters"] {
        assert!(json.get(key).is_some(), "{key} is missing");
    }

    let endless = PTX.replace("BARRIER", "again: bra again;");
    let endless = folder.write("endless.ptx", &endless);
    let output = folder.run(&["check", &endless, "--launch", &launch, "--quick"]);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{}", text(&output.stdout));
}

/// A hand-written sm_90a kernel that loads its operands through tensor maps and multiplies them with wgmma.
#[test]
fn check_proves_tensor_maps_and_products_of_warpgroups() {
    let folder = Folder::new("tma");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests/corpus");
    let read = |file: &str| std::fs::read_to_string(corpus.join(file)).unwrap();
    let (ptx, launch) = (read("ptx_tma_attention_sm90a.ptx"), read("ptx_tma_attention.toml"));
    let check = |ptx: &str, launch: &str| {
        let files = [folder.write("kernel.ptx", ptx), folder.write("launch.toml", launch)];
        let output = folder.run(&["check", &files[0], "--launch", &files[1]]);
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, said) = check(&ptx, &launch);
    assert_eq!(code, Some(0), "{said}");
    assert!(!said.contains("tensor cores unused") && !said.contains("L4"), "{said}");
    // Each error is from the run in which it is nearest its bound; the largest difference may be of another.
    for words in ["nearest its bound, over all runs: absolute error ", "largest difference, of any run: "] {
        assert!(said.contains(words), "{words}: {said}");
    }
    // Faults: no wait for the copies, products still in flight, a wrong number of expected bytes, no fence.
    for (from, to, reason) in [
        ("@!%done bra WAIT;", "", "race"),
        ("wgmma.wait_group.sync.aligned 0;", "", "no wgmma.wait_group covers it"),
        ("[arrived], 16384;", "[arrived], 8192;", "transaction"),
        ("wgmma.fence.sync.aligned;", "", "wgmma.fence"),
    ] {
        assert!(ptx.contains(from), "{from}");
        let (code, said) = check(&ptx.replacen(from, to, 1), &launch);
        assert!(code == Some(1) && said.contains(reason), "{from}: {code:?} {said}");
    }
    for (from, to, reason) in [
        (
            "box = [64, 64, 1, 1]",
            "box = [128, 64, 1, 1]",
            "[[arg]] 0: tensor map: invalid value '256' for box row in bytes: expected up to 128",
        ),
        ("of = \"v\"", "of = \"w\"", "invalid value 'w' for [[arg]] 2 of: expected q, k, v, out"),
        ("role = \"out\"", "role = \"out\", box = [1]", "[[arg]] 3 has role = \"out\", which takes no `box`"),
    ] {
        let (code, said) = check(&ptx, &launch.replacen(from, to, 1));
        assert!(code == Some(3) && said.contains(reason), "{to}: {code:?} {said}");
    }
}

/// The kernel uses 120,000 bytes of shared memory: more than sm_89 has and less than sm_80 has.
#[test]
fn ptx_is_emulated_on_the_architecture_asked_for() {
    let folder = Folder::new("architecture");
    let launch = folder.write("launch.toml", &LAUNCH.replace("[64]", "[64]\ndynamic_shared = 120000"));
    let kernel = PTX.replace("BARRIER", "bar.sync 0;");
    let older = folder.write("older.ptx", &kernel);
    let newer =
        folder.write("newer.ptx", &kernel.replace("sm_80", "sm_90a").replace(".version 7.0", ".version 8.0"));
    let check = |ptx: &str, sm: &[&str]| {
        let arguments: Vec<&str> =
            ["check", ptx, "--launch", &launch, "--quick"].iter().chain(sm).copied().collect();
        let output = folder.run(&arguments);
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    for sm in [&[] as &[&str], &["--sm", "80"], &["--sm", "90a"]] {
        let (code, said) = check(&older, sm);
        assert_eq!(code, Some(0), "{sm:?}: {said}");
    }
    assert!(check(&older, &["--sm", "89"]).1.contains("expected at most 101376 bytes on sm_89"));
    let (code, said) = check(&newer, &["--sm", "89"]);
    assert_eq!(code, Some(3));
    let refused = said.contains("invalid value '89' for --sm: expected 90: ");
    assert!(refused && said.contains("newer.ptx was written for sm_90a"), "{said}");
    let (code, said) = check(&older, &["--sm", "75"]);
    assert!(code == Some(3) && said.contains("invalid value '75' for --sm: expected 80 or later"), "{said}");
    let (code, said) = check(&older, &["--sm", "hopper"]);
    assert!(code == Some(3) && said.contains("expected an architecture, one of 50, 52"), "{said}");
}

#[test]
fn bad_usage_is_named_and_exits_with_3() {
    let folder = Folder::new("usage");
    let launch = folder.write("launch.toml", LAUNCH);
    let ptx = folder.write("right.ptx", &PTX.replace("BARRIER", "bar.sync 0;"));
    let broken = folder.write("broken.ptx", &PTX.replace("BARRIER", "bar.sync 0 0;"));
    let wrong_launch = folder.write("wrong.toml", &LAUNCH.replace("64]", "0]"));
    let two = folder.write("two.toml", &format!("{LAUNCH}{}", &LAUNCH[LAUNCH.find("[[arg]]").unwrap()..]));
    let illegal = folder.write("illegal.ptx", &PTX.replace("BARRIER", "add.f32 %rd1, %r1, %r2;"));
    let huge = folder.write("huge.toml", &LAUNCH.replace("[1]", "[2147483647, 65535, 65535]"));
    let beyond = folder.write("beyond.toml", &LAUNCH.replace("[1]", "[2147483648]"));
    let shared = folder.write("shared.toml", &LAUNCH.replace("[64]", "[64]\ndynamic_shared = 200000"));
    let problem = "[problem]\nheads_q = 8\nseq_q = 1000000\nhead_dim = 64\ndtype = \"f16\"\n";
    let slow = folder.write("slow.toml", &format!("{problem}{LAUNCH}"));
    let heads = problem.replace("heads_q = 8", "heads_q = 8\nheads_kv = 3").replace("000000", "0");
    let heads = folder.write("heads.toml", &format!("{heads}{LAUNCH}"));
    std::fs::create_dir(folder.0.join("folder.ptx")).unwrap();
    let unjudged = format!("{}{LAUNCH}", problem.replace("000000", "0"));
    let unjudged = folder.write("unjudged.toml", &unjudged);
    let cases: [(&[&str], &str); 46] = [
        (&["lab", "selftest", "--emulator", "--evidence", "rows.jsonl"], "--evidence: the commit is unknown"),
        (&["check", &ptx, "--launch", &unjudged], "no [[arg]] is its output"),
        (
            &["bench", "--device", "cuda", "--control", "0"],
            "invalid value '0' for --control: expected a whole number, 1 or more",
        ),
        (
            &["bench", "--device", "cuda", "--shape", "1x1x16x16"],
            "invalid value '1x1x16x16' for --shape: expected --device cpu, since --shape is for processors",
        ),
        (&["bench", "--suite", "foo"], "invalid value 'foo' for --suite: expected --device cuda"),
        (&["bench", "--mode", "warm"], "invalid value 'warm' for --mode: expected --device cuda"),
        (&["bench", "--plan", "none.json"], "invalid value 'none.json' for --plan: expected --device cuda"),
        (&["bench", "--device", "cuda", "--problem", "64,128,65536,128,bf16"], "bytes of tensors"),
        (&["bench", "--problem", "1,8/3,512,64,f16"], "expected a multiple of heads_kv = 3"),
        (&["explain", "--launch", &launch], "<FILE>"),
        (
            &["explain", "--problem", "1,8,512,64,f16", "--gpu", "none"],
            "invalid value 'none' for --gpu: expected cuda, ",
        ),
        (
            &["explain", "--problem", "1,8,512,64,f16", "--gpu", "l4", "--device", "l4"],
            "cannot be used with '--device",
        ),
        (
            &["run", "--q", "q.npy", "--out", "out.txt"],
            "invalid value 'out.txt' for --out: expected a .npy or",
        ),
        (&["check", &illegal, "--launch", &launch], "the PTX is invalid (1 error)"),
        (&["check", &ptx, "--launch", &huge], "fewer than 2^32 warps in all"),
        (&["check", &ptx, "--launch", &beyond], "invalid value '[2147483648]' for launch.grid"),
        (&["check", &ptx, "--launch", &shared], "expected at most 166912 bytes on sm_80"),
        (&["check", &ptx, "--launch", &slow], "invalid value '2.0e15 operations' for [problem]"),
        (&["check", &ptx, "--launch", &heads], "expected a multiple of heads_kv = 3"),
        (&["check", "folder.ptx", "--launch", &launch], "cannot read folder.ptx"),
        (&["check", &ptx, "--launch", "/dev/zero"], "it is longer than"),
        (&["climb", "--out", "none/report.html"], "cannot write none/report.html"),
        (&["climb", "--out", "folder.ptx"], "it is a folder: expected the name of a file"),
        (&["bench", "--seconds", "nan"], "invalid value 'nan' for --seconds"),
        (&["bench", "--device", "tpu"], "invalid value 'tpu' for --device: expected cpu, cuda, cuda:N, auto"),
        (
            &["bench", "--device", "cuda", "--suite", "all"],
            "invalid value 'all' for --suite: expected mission, small, forward, ampere",
        ),
        (
            &["bench", "--device", "cuda", "--mode", "hot"],
            "invalid value 'hot' for --mode: expected warm, cold, both (warm and cold), sustained",
        ),
        (&["bench", "--device", "cuda", "--plan", "none.json"], "cannot read none.json"),
        (&["bench", "--device", "cuda", "--plan", &launch], "expected one plan as JSON"),
        (&["bench", "--problem", "1,8,512"], "invalid value '1,8,512' for --problem"),
        (
            &["bench", "--problem", "1,1,16,16,f32,backward"],
            "invalid value '1,1,16,16,f32,backward' for --problem: expected a forward pass on the CPU",
        ),
        (&["bench", "--threads", "0"], "invalid value '0' for --threads"),
        (&["bench", "--shape", "99999999999x1x16x16"], "invalid value '99999999999x1x16x16' for --shape"),
        (&["bench", "--shape", "1x1x1000000x64"], "invalid value '1x1x1000000x64' for --shape"),
        (&["bench", "--shape", "0x1x16x16"], "invalid value '0' for batch: expected 1 or more"),
        (&["check", &ptx], "--launch"),
        (&["check", "none.ptx", "--launch", &launch], "cannot read none.ptx"),
        (&["check", &ptx, "--launch", "none.toml"], "cannot read none.toml"),
        (&["check", &launch, "--launch", &launch], "expected a .ptx file, a .cu file or FILE.py:FUNCTION"),
        (&["check", &ptx, "--launch", &ptx], "launch file:"),
        (&["check", &broken, "--launch", &launch], "line 19, column"),
        (&["check", &ptx, "--launch", &wrong_launch], "invalid value '[0]' for launch.block"),
        (&["check", &ptx, "--launch", &two], "2 [[arg]] given, but entry shift takes 1 parameters"),
        (&["explain", &ptx, "--launch", &launch, "--gpu", "TPU"], "invalid value 'TPU' for --gpu: expected "),
        (&["bench", "--shape", "1x2x3"], "invalid value '1x2x3' for --shape"),
        (&["fly"], "unknown command 'fly'"),
    ];
    for (args, expected) in cases {
        let output = folder.run(args);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {error}");
        assert!(error.contains(expected), "{args:?}: {error}");
        assert!(!error.contains("panicked"), "{args:?}: {error}");
    }
}

/// A negative number is reported as a bad value, not as an unknown option.
#[test]
fn negative_numbers_are_values() {
    let folder = Folder::new("negative");
    let whole = "expected a whole number, 0 or more";
    let some = "expected a whole number, 1 or more";
    let cases: [(&[&str], &str); 12] = [
        (
            &["bench", "--seconds", "-1"],
            "invalid value '-1' for --seconds: expected a number of seconds above 0, at most 3600",
        ),
        (&["bench", "--threads", "-1"], some),
        (
            &["bench", "--device", "cuda", "--control", "-1"],
            "invalid value '-1' for --control: expected a whole number",
        ),
        (&["explain", "--lines", "-1"], whole),
        (&["topk", "-k", "-1", "--problem", "1,8,512,64,f16", "--device", "h200"], some),
        (&["forecast", "list", "-n", "-1"], some),
        (
            &["forecast", "add", "x", "--author", "y", "--device", "h200", "--us", "-1"],
            "invalid value '-1' for --us",
        ),
        (&["serve", "--port", "-1"], "invalid value '-1' for --port: expected a port, 0 to 65535"),
        (&["check", "x.ptx", "--launch", "y", "--sm", "-1"], "expected an architecture, one of 50, 52"),
        (&["evolve", "--candidates", "-1"], some),
        (&["evolve", "--jobs", "-1"], some),
        (&["evolve", "--seed", "-1"], whole),
    ];
    for (args, expected) in cases {
        let output = folder.run(args);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {error}");
        assert!(error.contains(expected), "{args:?}: {error}");
    }
}

/// A forecast needs a device or a candidate, and the message names both options.
#[test]
fn a_forecast_is_of_something() {
    let folder = Folder::new("of");
    let output = folder.run(&["forecast", "add", "an idea", "--author", "Ada", "--us", "3"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("<--device <DEVICE>|--candidate <N>>"), "{}", text(&output.stderr));
}

/// The help of the commands that take a problem describes the notation that they accept with one text.
#[test]
fn every_command_states_problems_alike() {
    let folder = Folder::new("grammar");
    let help = |command: &[&str]| {
        let output = folder.run(&[command, &["--help"]].concat());
        text(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    for command in [&["explain"][..], &["bench"]] {
        assert!(help(command).contains(bench::suites::FORM), "{command:?}: {}", help(command));
    }
    // These commands refuse softcap and lse.
    for command in [&["topk"][..], &["evolve"], &["forecast", "add"], &["plans", "add"], &["plans", "clear"]]
    {
        assert!(help(command).contains(bench::suites::SHAPE_FORM), "{command:?}: {}", help(command));
    }
}

/// A binary file is reported as no text file. Text from a file is quoted short and without control
/// characters.
#[test]
fn files_of_bytes_leave_the_terminal_alone() {
    let folder = Folder::new("bytes");
    let launch = folder.write("launch.toml", LAUNCH);
    let ptx = folder.write("right.ptx", &PTX.replace("BARRIER", "bar.sync 0;"));
    let binary = folder.write("binary.ptx", "\x7fELF\0\0");
    let colours = folder.write("colours.ptx", ".version 7.0\n\x1b[31m red");
    let long = folder.write("long.toml", &format!("[launch \x1b[31m{}", "x".repeat(5000)));
    for (args, expected) in [
        (["check", &binary, "--launch", &launch], "binary.ptx: not a text file (NUL at byte 4)"),
        (["check", &ptx, "--launch", &binary], "binary.ptx: not a text file"),
        (["check", &colours, "--launch", &launch], "\\u{1b}[31m red"),
        (["check", &ptx, "--launch", &long], "long.toml: launch file: TOML parse error"),
    ] {
        let output = folder.run(&args);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{args:?}");
        assert!(error.contains(expected), "{args:?}: {error}");
        assert!(!error.contains('\x1b') && error.len() < 1000, "{args:?}: {error}");
    }
}

#[test]
fn tables_are_never_emptied() {
    let folder = Folder::new("tables");
    let document = "<!-- table:h200/evolution -->\nwhat was there\n<!-- /table -->\n";
    folder.write("README.md", document);
    let output = folder.run(&["lab", "tables", "README.md"]);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{error}");
    assert!(error.contains("invalid value 'h200/evolution' for a table: expected DEVICE/SUITE with rows in ./evidence/h200.jsonl"), "{error}");
    assert_eq!(std::fs::read_to_string(folder.0.join("README.md")).unwrap(), document);
    // A table that disagrees with existing rows is exit code 1, not bad usage.
    let evidence = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../evidence/h200.jsonl");
    let row = std::fs::read_to_string(evidence).unwrap();
    let row = row
        .lines()
        .find(|row| row.contains("\"suite\":\"evolution\"") && row.contains("\"problem\":{"))
        .unwrap();
    std::fs::create_dir(folder.0.join("evidence")).unwrap();
    folder.write("evidence/h200.jsonl", row);
    let code = |args: &[&str]| {
        let output = folder.run(&[&["lab", "tables", "README.md"], args].concat());
        (output.status.code(), text(&output.stderr))
    };
    let (stale, said) = code(&["--check"]);
    assert!(stale == Some(1) && said.contains("stale: ./README.md"), "{said}");
    let (made, said) = code(&[]);
    assert!(made == Some(0) && said.contains("README.md is rewritten"), "{said}");
    assert_eq!(code(&["--check"]).0, Some(0));
}

#[test]
fn ledgers_are_scored_checked_and_given_up() {
    let folder = Folder::new("ledger");
    let run = |args: &[&str]| {
        let output = folder.run(args);
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    assert_eq!(
        run(&["forecast", "add", "fewer", "--author", "Ada", "--device", "h200", "--us", "3"]).0,
        Some(0)
    );
    assert_eq!(run(&["forecast", "outcome", "1", "--us", "4"]).0, Some(0));
    // A rank correlation needs two forecasts.
    let (code, said) = run(&["forecast", "score"]);
    assert!(code == Some(0) && said.contains("–") && !said.contains("0.00"), "{said}");
    let (code, said) = run(&["ledger", "check"]);
    assert!(code == Some(0) && said.contains("pages, rows, references and summaries: sound"), "{said}");
    let path = folder.0.join("flashcore.ledger");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4096..].fill(0xa5);
    std::fs::write(&path, bytes).unwrap();
    let (code, said) = run(&["ledger", "export", "facts.jsonl"]);
    assert!(code == Some(3) && said.contains("is damaged") && !said.contains("ledger export"), "{said}");
    assert!(!folder.0.join("facts.jsonl").exists());
}

/// A pipe whose reader has closed it.
fn closed() -> Stdio {
    std::io::pipe().unwrap().1.into()
}

const SMALL: [&str; 5] = ["bench", "--shape", "1x1x16x16", "--seconds", "0.01"];

#[test]
fn who_stops_to_read_changes_no_exit_code() {
    let folder = Folder::new("closed");
    let code = |args: &[&str], error: bool| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        command.args(args).current_dir(&folder.0).env("FLASHCORE_PYTHON", "no-such-python");
        let command = if error { command.stderr(closed()) } else { command.stdout(closed()) };
        command.output().unwrap().status.code()
    };
    // The messages about the missing peer and the missing file go to a closed pipe.
    assert_eq!(code(&SMALL, true), Some(0));
    assert_eq!(code(&["check", "none.ptx", "--launch", "none.toml"], true), Some(3));
    assert_eq!((code(&SMALL, false), code(&[&SMALL[..], &["--json"]].concat(), false)), (Some(0), Some(0)));
    // Rows are written to the file before they are printed.
    let git = |args: &[&str]| {
        let name = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "commit.gpgsign=false"];
        let git = Command::new("git").args(name).args(args).current_dir(&folder.0).output().unwrap();
        assert!(git.status.success(), "{}", text(&git.stderr));
    };
    git(&["init", "--quiet"]);
    git(&["commit", "--quiet", "--allow-empty", "-m", "first"]);
    // A missing folder is refused before the race and is not created.
    let kept = [&SMALL[..], &["--json", "--evidence"]].concat();
    let refused = folder.run(&kept);
    assert_eq!(refused.status.code(), Some(3));
    assert!(text(&refused.stderr).contains("there is no folder evidence") && refused.stdout.is_empty());
    assert!(!folder.0.join("evidence").exists());
    std::fs::create_dir(folder.0.join("evidence")).unwrap();
    assert_eq!(code(&kept, false), Some(0));
    let rows = std::fs::read_to_string(folder.0.join("evidence/cpu.jsonl")).unwrap();
    assert_eq!(rows.lines().count(), 1, "{rows}");
    let search = ["evolve", "--device", "l4", "--problem", "1,1,64,64,f16", "--candidates", "1", "--quiet"];
    assert_eq!(folder.run(&search).status.code(), Some(0));
    assert_eq!(code(&["report", "--out", "-"], false), Some(0));
}

/// Two false PyTorch installations: the first rejects each problem, the process of the second ends.
#[cfg(unix)]
#[test]
fn what_the_peer_cannot_do_is_told_and_ours_is_timed() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("peer");
    let refuses = "while read line; do echo '{\"error\": \"TypeError: enable_gqa\"}'; done";
    for (name, rest, said) in
        [("refuses", refuses, "no peer: PyTorch: TypeError: enable_gqa"), ("ends", "", "no peer: ")]
    {
        let python = folder.write(name, &format!("#!/bin/sh\necho '{{\"version\": \"0\"}}'\n{rest}\n"));
        let python = folder.0.join(python);
        std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        let output =
            command.args(SMALL).current_dir(&folder.0).env("FLASHCORE_PYTHON", python).output().unwrap();
        let (table, told) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(0), "{name}: {told}");
        assert!(told.contains(said), "{name}: {told}");
        assert!(table.contains("f32 B1 H1 S16 D16") && !table.contains("NaN"), "{name}: {table}");
    }
}

/// Without PATH, home folder, tools or Python, every command that needs none of them works, and the others
/// say what is missing.
#[test]
fn a_bare_machine_is_enough() {
    let folder = Folder::new("bare");
    let launch = folder.write("launch.toml", LAUNCH);
    let ptx = folder.write("right.ptx", &PTX.replace("BARRIER", "bar.sync 0;"));
    let cuda = folder.write("kernel.cu", "__global__ void k() {}");
    let bare = |args: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_flashcore"))
            .args(args)
            .current_dir(&folder.0)
            .env_clear()
            .env("PATH", &folder.0)
            .output()
            .unwrap()
    };
    let check = bare(&["check", &ptx, "--launch", &launch]);
    assert_eq!(check.status.code(), Some(0), "{}", text(&check.stderr));
    assert_eq!(bare(&["explain", &ptx, "--launch", &launch]).status.code(), Some(0));
    let doctor = bare(&["doctor"]);
    assert_eq!(doctor.status.code(), Some(0), "{}", text(&doctor.stderr));
    let compiled = bare(&["check", &cuda, "--launch", &launch]);
    assert_eq!(compiled.status.code(), Some(3));
    assert!(text(&compiled.stderr).contains("set FLASHCORE_NVRTC"), "{}", text(&compiled.stderr));
}

/// The verdict stands when the reader closes the pipe. A full disk is an error.
#[test]
fn the_exit_code_survives_the_output() {
    let folder = Folder::new("output");
    let launch = folder.write("launch.toml", LAUNCH);
    let racy = folder.write("racy.ptx", &PTX.replace("BARRIER", ""));
    let to = |stdout: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        command
            .args(["check", &racy, "--launch", &launch])
            .stdout(stdout)
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let mut child = to(Stdio::piped());
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(1));
    if let Ok(full) = std::fs::OpenOptions::new().write(true).open("/dev/full") {
        assert_eq!(to(full.into()).wait().unwrap().code(), Some(3));
    }
}

#[test]
fn run_computes_attention_on_files_and_leaves_no_half_of_one() {
    let folder = Folder::new("run");
    let tensor = |shape: [usize; 4]| {
        let count: usize = shape.iter().product();
        let values = judge::values::Values::F32((0..count).map(|i| (i % 7) as f32 / 7.0).collect());
        check::files::Tensor { values, shape: shape.to_vec() }
    };
    let save = |name: &str, tensors: &[(&str, [usize; 4])]| {
        let tensors = tensors.iter().map(|&(n, shape)| (n.to_owned(), tensor(shape))).collect();
        check::files::save(&folder.0.join(name), &tensors).unwrap();
    };
    save("in.safetensors", &[("q", [1, 2, 3, 8]), ("k", [1, 2, 5, 8]), ("v", [1, 2, 5, 8])]);
    let output = folder.run(&["run", "--q", "in.safetensors", "--out", "out.safetensors", "--causal"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let out = check::files::load(&folder.0.join("out.safetensors"), "out").unwrap();
    assert_eq!(out.shape, [1, 2, 3, 8]);
    assert!((0..out.values.len()).filter_map(|i| out.values.get(i)).all(|x| (0.0..=1.0).contains(&x)));
    assert_eq!(check::files::load(&folder.0.join("out.safetensors"), "lse").unwrap().shape, [1, 2, 3]);

    save("bad.safetensors", &[("q", [1, 2, 3, 8]), ("k", [1, 2, 5, 4]), ("v", [1, 2, 5, 8])]);
    save("empty.safetensors", &[("q", [1, 2, 0, 8]), ("k", [1, 2, 5, 8]), ("v", [1, 2, 5, 8])]);
    save("heads.safetensors", &[("q", [1, 2, 3, 8]), ("k", [1, 3, 5, 8]), ("v", [1, 3, 5, 8])]);
    let mut types: std::collections::BTreeMap<_, _> =
        ["q", "k", "v"].map(|name| (name.to_owned(), tensor([1, 1, 2, 8]))).into();
    types.insert(
        "k".into(),
        check::files::Tensor {
            values: judge::values::Values::round(problem::DType::F16, &[0.5; 16]),
            shape: vec![1, 1, 2, 8],
        },
    );
    check::files::save(&folder.0.join("types.safetensors"), &types).unwrap();
    let rank = check::files::Tensor { shape: vec![2, 8], ..tensor([1, 1, 2, 8]) };
    check::files::save(&folder.0.join("rank.npy"), &[("q".to_owned(), rank)].into()).unwrap();
    std::fs::create_dir(folder.0.join("folder.npy")).unwrap();
    let before = folder.names();
    let windows = ["--q", "in.safetensors", "--out", "bad.npy", "--window", "3,2"];
    let causal = [&["run"], &windows[..], &["--causal"]].concat();
    let top_left = [&["run"], &windows[..], &["--causal-top-left"]].concat();
    let cases: [(&[&str], &str); 13] = [
        (&causal, "invalid value '3,2' for --window: expected BEFORE,0 with --causal"),
        (&top_left, "invalid value '3,2' for --window: expected BEFORE,0 with --causal-top-left"),
        (&["run", "--q", "bad.safetensors", "--out", "bad.npy"], "batch and head dim must agree"),
        (&["run", "--q", "in.safetensors", "--out", "bad.txt"], ".npy or a .safetensors file"),
        (&["run", "--q", "in.safetensors", "--out", "no/bad.npy"], "cannot write no/bad.npy"),
        (&["run", "--q", "in.safetensors", "--out", "folder.npy"], "it is a folder"),
        (&["run", "--q", "none.safetensors", "--out", "bad.npy"], "cannot read none.safetensors"),
        (&["run", "--q", "out.safetensors", "--out", "bad.npy"], "has no tensor \"q\"; it has: "),
        (
            &["run", "--q", "empty.safetensors", "--out", "bad.npy"],
            "invalid value '0' for seq_q: expected 1 or more",
        ),
        (&["run", "--q", "heads.safetensors", "--out", "bad.npy"], "expected a multiple of heads_kv = 3"),
        (&["run", "--q", "types.safetensors", "--out", "bad.npy"], "k holds f16, but q holds f32"),
        (
            &["run", "--q", "rank.npy", "--k", "rank.npy", "--v", "rank.npy", "--out", "bad.npy"],
            "four dimensions",
        ),
        (
            &["run", "--q", "in.safetensors", "--out", "bad.npy", "--scale", "nan"],
            "invalid value 'NaN' for scale: expected a finite number",
        ),
    ];
    for (args, expected) in cases {
        let output = folder.run(args);
        assert_eq!(output.status.code(), Some(3), "{args:?}");
        assert!(text(&output.stderr).contains(expected), "{args:?}: {}", text(&output.stderr));
    }
    assert_eq!(folder.names(), before);
}

#[test]
fn doctor_and_help_speak() {
    let folder = Folder::new("doctor");
    let output = folder.run(&["doctor"]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("native kernels"));
    let output = folder.run(&["doctor", "--json"]);
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let found = found["rows"].as_array().unwrap().clone();
    let cubins = found.iter().find(|finding| finding["what"] == "cubins").unwrap();
    assert!(cubins["details"]["writable"].is_boolean(), "{cubins}");
    let gpu = found.iter().find(|finding| finding["what"] == "gpu").unwrap();
    // The GPU's description, or the reason why there is none.
    assert!(gpu["details"]["sm"].is_number() || gpu["details"]["reason"].is_string(), "{gpu}");
    let output = folder.run(&["check", "--help"]);
    assert!(
        output.status.success()
            && text(&output.stdout).contains("0 passed, 1 failed, 2 incomplete, 3 bad usage")
    );
    // The manual page has the whole format of the launch file, for which the help has no room.
    assert!(text(&output.stdout).lines().count() < 170, "{}", text(&output.stdout));
    let output = folder.run(&["man", "check"]);
    for key in ["[problem]", "[[arg]]", "role = \"tensor_map\"", "swizzle = \"128\"", "fill = \"zeros\""] {
        assert!(text(&output.stdout).contains(key), "{key}: {}", text(&output.stdout));
    }
}

#[test]
fn selftest_without_a_gpu_says_so() {
    let folder = Folder::new("selftest");
    // No machine has a device of this number.
    let output = folder.run(&["lab", "selftest", "--quick", "--device", "4096"]);
    assert_eq!(output.status.code(), Some(3));
    let message = text(&output.stderr);
    assert!(message.contains("no CUDA driver") || message.contains("4096"), "{message}");
}
