//! Files made to mislead or to stall: their contents must not control or flood the terminal, or take
//! unlimited time.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::folder::{Folder, text};

const HEAD: &str = ".version 8.0\n.target sm_80\n.address_size 64\n";
/// A loop that the limit of steps does not end within the time limit of the test.
const ENDLESS: &str = ".visible .entry k()\n{\n.reg .f32 %f<2>;\nmov.f32 %f1, 0f3F800000;\nL:\nex2.approx.f32 %f1, %f1;\n\
                       sin.approx.f32 %f1, %f1;\nex2.approx.f32 %f1, %f1;\nsin.approx.f32 %f1, %f1;\nbra L;\n}\n";
const NO_ARGUMENTS: &str = "[launch]\ngrid = [1]\nblock = [32]\n";
/// Moves the cursor up three lines, clears them and claims a verdict; then does so with a C1 control
/// character and a direction override.
const SPOOF: &str = "\x1b[1A\x1b[2K\x1b[1A\x1b[2K\x1b[1A\x1b[2Kpassed after 12 runs in the emulator\x1b[8m\u{9b}1A\u{202e}\u{200b}";

/// A kernel that reads out of bounds in a line with this comment.
fn wild(comment: &str) -> String {
    format!(
        "{HEAD}.visible .entry k()\n{{\n.reg .b32 %r<3>; .reg .b64 %rd<3>;\nmov.u64 %rd1, 0;\n\
         ld.global.u32 %r1, [%rd1]; // {comment}\nret;\n}}\n"
    )
}

/// Whether a text controls a terminal, hides text or changes its order.
fn steers(said: &str) -> bool {
    let invisible = ['\u{200b}', '\u{202e}', '\u{2028}'];
    said.chars().any(|c| c.is_control() && c != '\n' || invisible.contains(&c))
}

#[test]
fn no_file_steers_the_terminal() {
    let folder = Folder::new("spoof");
    let launch = folder.write("none.toml", NO_ARGUMENTS);
    let spoof = folder.write("spoof.ptx", &wild(SPOOF));
    let broken = folder.write("broken.ptx", &format!("{HEAD}.visible .entry k() {{ frob{SPOOF}; }}"));
    let keys =
        folder.write("keys.toml", &format!("[launch]\n\"{}\" = 1\n", SPOOF.replace('\x1b', "\\u001b")));
    let name = format!("\x1b[2K{}\npassed\u{202e}.ptx", "n");
    let named = folder.write(&name, &wild(""));
    let problem = format!("1,8{SPOOF}");
    let plan = folder.write("plan.json", &format!("{{\"{}\": 1}}", SPOOF.replace('\x1b', "\\u001b")));
    let plan = std::fs::read_to_string(plan).unwrap();
    let idea = format!("idea{SPOOF}\npassed");
    let forecast = ["forecast", "add", &idea, "--author", &idea, "--device", "h200", "--us", "3"];
    assert_eq!(folder.run(&forecast).status.code(), Some(0));
    let whole = ["--problem", "1,8,512,64,f16"];
    let asked: Vec<Vec<&str>> = vec![
        vec!["check", &spoof, "--launch", &launch],
        vec!["check", &spoof, "--launch", &launch, "--json"],
        vec!["explain", &spoof, "--launch", &launch],
        vec!["explain", &spoof, "--launch", &launch, "--json"],
        vec!["check", &broken, "--launch", &launch],
        vec!["check", &spoof, "--launch", &keys],
        vec!["check", &name, "--launch", &launch],
        vec!["check", &named, "--launch", &name],
        vec!["check", &idea, "--launch", &launch],
        vec!["explain", "--problem", &problem],
        vec!["explain", whole[0], whole[1], "--device", &idea],
        vec!["explain", whole[0], whole[1], "--device", "l4", "--plan", &plan],
        vec!["topk", whole[0], whole[1], "--device", &idea],
        vec!["forecast", "list"],
        vec!["forecast", "list", "--json"],
        vec!["forecast", "score"],
        vec!["forecast", "add", "x", "--author", "x", "--device", "h200", "--us", &idea],
        vec!["forecast", "add", "x", "--author", "x", "--device", &idea, "--us", "3"],
        vec!["ledger", "runs", "--ledger", &idea],
        vec!["ledger", "check"],
        vec!["ledger", "export", &idea],
        vec!["report", "--ledger", &idea],
        vec!["run", "--q", &idea, "--out", "x.npy"],
        vec!["run", "--q", "q.npy", "--out", &idea],
        vec!["bench", "--device", &idea],
        vec!["evolve", "--device", &idea],
        vec![idea.as_str()],
    ];
    for args in asked {
        let output = folder.run(&args);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(!said.is_empty() && !steers(&said), "{args:?}: {said}");
        // No line from a file begins where a verdict would stand.
        assert!(!said.lines().any(|line| line.starts_with("passed")), "{args:?}: {said}");
        assert!(!said.contains("panicked"), "{args:?}: {said}");
    }
    let output = folder.run(&["check", &spoof, "--launch", &launch]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1));
    assert!(said.starts_with("failed") && said.contains("// \\u{1b}[1A\\u{1b}[2K"), "{said}");
    // JSON output carries the text unchanged.
    let output = folder.run(&["check", &spoof, "--launch", &launch, "--json"]);
    let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(said["hazards"][0]["text"].as_str().unwrap().ends_with(SPOOF), "{said}");
}

#[test]
fn messages_are_short_whatever_the_file() {
    let folder = Folder::new("long");
    let launch = folder.write("none.toml", NO_ARGUMENTS);
    let long = "x".repeat(1_000_000);
    let entries: String = (0..2000).map(|i| format!(".visible .entry k{i}() {{ ret; }}\n")).collect();
    let params: Vec<String> = (0..200).map(|i| format!(".param .u32 p{i}")).collect();
    let wrong: String = (0..500).map(|_| "add.f32 %r1, %r1, %r1;\n").collect();
    let files = [
        ("literal.ptx", format!("{HEAD}.visible .entry k() {{ mov.u32 %r1, {long}; }}")),
        ("directive.ptx", format!("{HEAD}.{long} k()")),
        ("entries.ptx", format!("{HEAD}{entries}")),
        ("params.ptx", format!("{HEAD}.visible .entry k({}) {{ ret; }}", params.join(", "))),
        ("wrong.ptx", format!("{HEAD}.visible .entry k() {{ .reg .b64 %r1; {wrong} ret; }}")),
        ("comment.ptx", wild(&long)),
    ];
    for (name, contents) in files {
        let file = folder.write(name, &contents);
        for command in ["check", "explain"] {
            let output = folder.run(&[command, &file, "--launch", &launch]);
            let said = text(&output.stdout) + &text(&output.stderr);
            assert!(said.len() < 6000, "{name}: {} bytes, {}", said.len(), &said[..6000]);
        }
    }
    let entries =
        folder.run(&["check", &folder.0.join("entries.ptx").display().to_string(), "--launch", &launch]);
    assert!(text(&entries.stderr).contains("k9 and 1,990 more"), "{}", text(&entries.stderr));
    let role = folder.write("role.toml", &format!("{NO_ARGUMENTS}[[arg]]\nrole = \"{long}\"\n"));
    let wild = folder.write("wild.ptx", &wild(""));
    let said = text(&folder.run(&["check", &wild, "--launch", &role]).stderr);
    assert!(said.contains("invalid value 'xxx") && said.len() < 1000, "{} bytes", said.len());
}

#[test]
fn byte_order_marks_are_no_part_of_a_text() {
    let folder = Folder::new("mark");
    let launch = folder.write("none.toml", &format!("\u{feff}{NO_ARGUMENTS}"));
    let ptx = folder.write("k.ptx", &format!("\u{feff}{HEAD}.visible .entry k() {{ ret; }}"));
    let output = folder.run(&["check", &ptx, "--launch", &launch]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn inputs_are_not_overwritten() {
    let folder = Folder::new("overwrite");
    let values = || judge::values::Values::F32(vec![0.5; 16]);
    let tensor = || check::files::Tensor { values: values(), shape: vec![1, 1, 2, 8] };
    let path = folder.0.join("in.safetensors");
    let tensors = ["q", "k", "v"].map(|name| (name.to_owned(), tensor()));
    check::files::save(&path, &tensors.into()).unwrap();
    for name in ["k.npy", "v.npy"] {
        check::files::save(&folder.0.join(name), &[("x".to_owned(), tensor())].into()).unwrap();
    }
    std::fs::hard_link(&path, folder.0.join("hard.safetensors")).unwrap();
    #[cfg(unix)]
    std::os::unix::fs::symlink(&path, folder.0.join("soft.safetensors")).unwrap();
    let before = std::fs::read(&path).unwrap();
    let launch = folder.write("none.toml", NO_ARGUMENTS);
    let ptx = folder.write("k.ptx", &wild(""));
    let dotted = "./in.safetensors";
    let mut cases: Vec<(Vec<&str>, &str)> = vec![
        (vec!["run", "--q", "in.safetensors", "--out", dotted], "is the same file as --q in.safetensors"),
        (vec!["run", "--q", "in.safetensors", "--out", "hard.safetensors"], "is the same file as --q"),
        (
            vec!["run", "--q", "in.safetensors", "--k", "k.npy", "--v", "v.npy", "--out", "v.npy"],
            "is the same file as --v v.npy",
        ),
        (vec!["check", &ptx, "--launch", &launch, "--keep-ptx", "k.ptx"], "is the same file as FILE"),
        (vec!["check", &ptx, "--launch", &launch, "--keep-ptx", "none.toml"], "is the same file as --launch"),
    ];
    if cfg!(unix) {
        let soft = vec!["run", "--q", "in.safetensors", "--out", "soft.safetensors"];
        cases.push((soft, "is the same file as --q"));
    }
    for (args, expected) in cases {
        let output = folder.run(&args);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(3) && said.contains(expected), "{args:?}: {said}");
    }
    assert_eq!(std::fs::read(&path).unwrap(), before);
    assert_eq!(std::fs::read_to_string(&ptx).unwrap(), wild(""));
    // A ledger is refused as the output file for a page or for rows.
    let forecast = ["forecast", "add", "x", "--author", "x", "--device", "h200", "--us", "3"];
    assert_eq!(folder.run(&forecast).status.code(), Some(0));
    for args in [
        &["report", "--out", "flashcore.ledger"][..],
        &["ledger", "export", "flashcore.ledger"],
        &["evolve", "--promote", "flashcore.ledger", "--device", "h200"],
    ] {
        let said = text(&folder.run(args).stderr);
        assert!(said.contains("is the same file as --ledger"), "{args:?}: {said}");
    }
    assert_eq!(folder.run(&["ledger", "check"]).status.code(), Some(0));
}

/// An endless loop that stores, and a grid that is too large, end with a reason.
#[test]
fn a_check_ends_in_time() {
    let folder = Folder::new("time");
    let launch = folder.write("none.toml", NO_ARGUMENTS);
    let endless = folder.write(
        "endless.ptx",
        &format!(
            "{HEAD}.shared .b32 word;\n.visible .entry k()\n{{\n.reg .b32 %r<2>;\nmov.u32 %r1, word;\n\
             again:\nst.volatile.shared.u32 [%r1], %r1;\nbra again;\n}}\n"
        ),
    );
    let one_thread = folder.write("one.toml", "[launch]\ngrid = [1]\nblock = [1]\n");
    let output = folder.run(&["check", &endless, "--launch", &one_thread, "--timeout", "0.2"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{said}{}", text(&output.stderr));
    assert!(
        said.starts_with("incomplete") && said.contains("the time limit of 0.2 s was exceeded"),
        "{said}"
    );
    // No progress bar, and no character that moves the cursor back.
    assert!(!text(&output.stderr).contains(['\r', '\x1b']), "{:?}", text(&output.stderr));
    let output = folder.run(&["explain", &endless, "--launch", &one_thread, "--timeout", "0.2"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("the time limit of 0.2 s was exceeded"),
        "{}",
        text(&output.stdout)
    );
    let nothing = folder.write("nothing.ptx", &format!("{HEAD}.visible .entry k() {{ ret; }}"));
    let huge = folder.write("huge.toml", &NO_ARGUMENTS.replace("[1]", "[2147483647]"));
    let output = folder.run(&["check", &nothing, "--launch", &huge]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("the grid has 2147483647 CTAs"), "{said}");
    for wrong in ["0", "-1", "nan", "soon"] {
        let output = folder.run(&["check", &nothing, "--launch", &launch, "--timeout", wrong]);
        assert!(text(&output.stderr).contains("expected a number of seconds above 0"), "{wrong}");
    }
}

/// A store that would be out of bounds, but that no input of the check executes.
const TRAP: &str = ".visible .entry k(.param .u64 a)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<4>;
    .reg .pred %p<3>;
    ld.param.u64 %rd1, [a];
    ld.global.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0x3f8ccccd;
    @%p1 st.global.u32 [%rd1+1073741824], %r1;
    ret;
}
";

#[test]
fn a_check_says_what_ran() {
    let folder = Folder::new("coverage");
    let trap = folder.write("trap.ptx", &format!("{HEAD}{TRAP}"));
    let argument = "[[arg]]\nrole = \"buffer\"\ndtype = \"f32\"\nelements = 16\ninit = \"random\"\n";
    let launch = folder.write("trap.toml", &format!("{NO_ARGUMENTS}{argument}"));
    let check = |more: &[&str]| {
        let output = folder.run(&[&["check", &trap, "--launch", &launch], more].concat());
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, said) = check(&[]);
    assert_eq!(code, Some(0), "{said}");
    for part in [
        "after 3 runs",
        "1 shape of k: grid [1, 1, 1], block [32, 1, 1]",
        "4 of 5 instructions executed (80 %); never executed: lines 12",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(check(&["--require-coverage", "80"]).0, Some(0));
    let (code, said) = check(&["--require-coverage", "100"]);
    assert!(code == Some(2) && said.contains("100 % were asked for, and 4 of 5"), "{said}");
    let (_, said) = check(&["--json"]);
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&said["runs"], &said["coverage"]["executed"]), (&3.into(), &4.into()));
    assert_eq!(said["coverage"]["missing_lines"], serde_json::json!([[12, 12]]));
    assert_eq!(said["shapes"][0]["grid"], serde_json::json!([1, 1, 1]));
    assert!(check(&["--require-coverage", "101"]).1.contains("expected a number from 0 to 100"));
}

/// Notes do not fail a check, and options decide which findings are notes.
#[test]
fn a_check_takes_notes_and_prints() {
    let folder = Folder::new("notes");
    let filetest = |path: &str| {
        std::fs::read_to_string(format!("{}/../../filetests/{path}", env!("CARGO_MANIFEST_DIR"))).unwrap()
    };
    let argument = "[[arg]]\nrole = \"buffer\"\ndtype = \"u32\"\nelements = 32\n";
    let launch = folder.write("one.toml", &format!("{NO_ARGUMENTS}{argument}"));
    let check = |path: &str, more: &[&str]| {
        let file = folder.write("kernel.ptx", &filetest(path));
        let output = folder.run(&[&["check", &file, "--launch", &launch], more].concat());
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let vector = "hazard/vector_in_a_word_array.ptx";
    let (code, said) = check(vector, &[]);
    assert!(code == Some(0) && said.contains("note: unpromised_alignment at line"), "{said}");
    let (code, said) = check(vector, &["--strict-alignment"]);
    assert!(code == Some(1) && said.contains("misaligned at line"), "{said}");
    let shuffle = "hazard/shuffle_orders_no_memory.ptx";
    assert_eq!(check(shuffle, &["--level", "ptx"]).0, Some(1));
    let (code, said) = check(shuffle, &[]);
    assert!(code == Some(0) && said.contains("note: warp_order at line"), "{said}");
    assert!(check(shuffle, &["--printf"]).1.contains("printf: nothing was printed in the first run"));
    let (code, said) = check("run/printed.ptx", &["--printf"]);
    assert!(code == Some(0) && said.contains("printf of CTA 0 warp 0 lane 0: n=-07 0x1p 3.50|x"), "{said}");
    assert!(!check("run/printed.ptx", &[]).1.contains("printf of"));
    let repeated = filetest("run/printed.ptx")
        .replace("@%p0 bra DONE;", "@%p0 bra DONE;\nmov.u32 %r5, 0;\nAGAIN:")
        .replace("\nDONE:", "\nadd.u32 %r5, %r5, 1;\nsetp.lt.u32 %p1, %r5, 1500;\n@%p1 bra AGAIN;\nDONE:");
    let file = folder.write("repeated.ptx", &repeated);
    let said = text(&folder.run(&["check", &file, "--launch", &launch, "--printf"]).stdout);
    assert!(said.contains("printf: 476 more texts are not shown"), "{said}");
    let (code, said) = check("hazard/unknown_function_called.ptx", &[]);
    assert!(code == Some(2) && said.contains("a call of `elsewhere`"), "{said}");
}

/// Only a terminal gets a progress bar. Elsewhere nothing moves the cursor back.
#[test]
fn progress_leaves_logs_alone() {
    let folder = Folder::new("logs");
    let mut bench = Command::new(env!("CARGO_BIN_EXE_flashcore"));
    bench.args(["bench", "--shape", "1x1x16x16", "--seconds", "0.01"]).current_dir(&folder.0);
    let output = bench.env("FLASHCORE_PYTHON", "no-such-python").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(!text(&output.stderr).contains(['\r', '\x1b']), "{:?}", text(&output.stderr));
    let output = folder.run(&["lab", "microbench", "--emulator", "--only", "bar.sync", "--out", "m.json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(!text(&output.stderr).contains(['\r', '\x1b']), "{:?}", text(&output.stderr));
    // A check that takes long says after a second where it is.
    let endless = folder.write("endless.ptx", &format!("{HEAD}{ENDLESS}"));
    let launch = folder.write("none.toml", NO_ARGUMENTS);
    let check = ["check", &endless, "--launch", &launch, "--timeout", "2"];
    let output = folder.run(&check);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stdout));
    let said = text(&output.stderr);
    assert!(said.starts_with("flashcore: 0 of ") && said.contains(" runs done; run 1: 0 of "), "{said:?}");
    assert!(!said.contains(['\r', '\x1b']), "{said:?}");
    for quiet in ["--quiet", "--json"] {
        let output = folder.run(&[&check[..], &[quiet]].concat());
        assert_eq!(text(&output.stderr), "", "{quiet}");
    }
}

/// A server that is stopped at the end of the test, and its address.
struct Server(Child, String);

impl Server {
    fn start(folder: &Folder) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        let command = command.args(["serve", "--port", "0"]).current_dir(&folder.0);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().trim_start_matches("http://").trim_end_matches('/').to_owned();
        Server(child, address)
    }

    fn send(&self, request: impl AsRef<[u8]>) -> TcpStream {
        let mut stream = TcpStream::connect(&self.1).unwrap();
        // Longer than any answer takes, so that a server that hangs fails the test.
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream.write_all(request.as_ref()).unwrap();
        stream
    }

    fn get(&self, path: &str, more: &str) -> String {
        self.asked(path, self.1.as_bytes(), more)
    }

    fn asked(&self, path: &str, host: &[u8], more: &str) -> String {
        let parts = [b"GET ", path.as_bytes(), b" HTTP/1.1\r\nHost: ", host, b"\r\nConnection: close\r\n"];
        let head = [&parts.concat(), more.as_bytes(), b"\r\n"].concat();
        let mut answer = Vec::new();
        self.send(&head).read_to_end(&mut answer).unwrap();
        text(&answer)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn half_open_connections_leave_the_server_open() {
    let folder = Folder::new("half");
    let server = Server::start(&folder);
    let halves: Vec<TcpStream> = (0..300).map(|_| server.send("GET / HTTP/1.1\r\nX: ")).collect();
    // The ledger is missing, and the page says so.
    let answer = server.get("/", "");
    assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("there is no ledger"), "{answer}");
    drop(halves);
}

#[test]
fn pages_of_other_sites_get_nothing_from_the_server() {
    let folder = Folder::new("foreign");
    let server = Server::start(&folder);
    let foreign = "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\nSec-Fetch-Dest: image\r\n";
    for path in ["/", "/candidate/1/kernel", "/diff/part?a=1&b=2"] {
        let answer = server.get(path, foreign);
        assert!(answer.starts_with("HTTP/1.1 403"), "{path}: {answer}");
        assert!(!server.get(path, "Sec-Fetch-Site: same-origin\r\n").starts_with("HTTP/1.1 403"), "{path}");
    }
}

#[test]
fn a_host_that_is_not_this_server_gets_nothing() {
    let folder = Folder::new("host");
    let server = Server::start(&folder);
    let hosts: [&[u8]; 8] = [
        b"evil.example",
        "bücher.example".as_bytes(),
        b"\xff\xfe",
        b"localhost\xc2\xa0",
        "ⓛocalhost".as_bytes(),
        b"",
        b"localhost, evil.example",
        b"evil.example@localhost",
    ];
    for host in hosts {
        let answer = server.asked("/", host, "");
        assert!(answer.starts_with("HTTP/1.1 421"), "{host:?}: {answer}");
    }
    for hosts in ["Host: evil.example\r\n", "Host: \u{e9}\r\n"] {
        let answer = server.get("/", hosts);
        assert!(answer.starts_with("HTTP/1.1 421"), "a second {hosts:?}: {answer}");
    }
    assert!(server.get("/", "").starts_with("HTTP/1.1 503"));
}

#[test]
fn a_parameter_that_a_page_does_not_have_is_refused() {
    let folder = Folder::new("parameters");
    let server = Server::start(&folder);
    for (path, said) in [
        ("/run/1?limit=3", "Invalid parameter &#39;limit&#39;"),
        ("/run/1?before=3", "This page has no parameters"),
        ("/?befor=3", "This page has, each at most once: before."),
        ("/?before=3&before=4", "Invalid parameter &#39;before&#39;"),
        ("/?=", "Invalid parameter"),
        ("/run/1/candidates?before=3&x", "Invalid parameter &#39;x&#39;"),
        ("/run/1/candidates.csv?all", "This page has no parameters"),
        ("/compare?a=1&b=2&c=3", "each at most once: a, b."),
        ("/diff?a=1&b=2&%63=3", "Invalid parameter &#39;c&#39;"),
        ("/topk?problem=x&Device=y", "each at most once: problem, device."),
        ("/api/run/1?x=%ff%00", "This page has no parameters"),
        ("/live.js?x", "This page has no parameters"),
    ] {
        let answer = server.get(path, "").replace("&#x27;", "&#39;").replace('\'', "&#39;");
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains(said), "{path}: {answer}");
    }
    // Without a ledger, a page that exists answers 503.
    for path in ["/", "/?", "/run/1?", "/?before=3", "/compare?a=1&b=2", "/topk?problem=x&device=y"] {
        let answer = server.get(path, "");
        assert!(answer.starts_with("HTTP/1.1 503"), "{path}: {answer}");
    }
}
