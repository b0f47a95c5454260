//! Runs child processes that may hang: reads their output line by line, and kills a silent child.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::store::Scratch;

/// How a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Exited(ExitStatus),
    /// The child printed nothing for the time limit and was killed.
    Silent,
}

/// Runs a command to its end and passes each line of its standard output to `line`. A child that prints no
/// line for `limit` is killed: it may be waiting for a kernel that never ends. A child that has closed its
/// standard output is killed if it does not end within `limit`.
///
/// # Errors
/// When the child cannot be started or waited for.
pub fn follow(command: &mut Command, limit: Duration, mut line: impl FnMut(&str)) -> std::io::Result<Ended> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.take().ok_or_else(|| std::io::Error::other("the child has no output"))?;
    let (tell, lines) = channel();
    let reader = std::thread::spawn(move || {
        // A read error is treated like the end of the pipe.
        let _ = BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| tell.send(line));
    });
    let ended = loop {
        match lines.recv_timeout(limit) {
            Ok(text) => line(&text),
            Err(RecvTimeoutError::Timeout) => {
                child.kill()?;
                child.wait()?;
                break Ended::Silent;
            }
            Err(RecvTimeoutError::Disconnected) => {
                break wait_within(&mut child, limit)?.map_or(Ended::Silent, Ended::Exited);
            }
        }
    };
    drop(lines);
    // The reader thread ends with the child's output. If a grandchild holds the pipe open, the thread is not
    // joined.
    if reader.is_finished() {
        let _ = reader.join();
    }
    Ok(ended)
}

/// Runs a command and returns its exit status with its standard output and error. Returns `None` if the
/// command exceeded the limit and was killed.
///
/// # Errors
/// When the child cannot be started or waited for.
pub fn within(command: &mut Command, limit: Duration) -> std::io::Result<Option<(ExitStatus, String)>> {
    // The output goes to a file: a pipe could fill up, or stay open as long as a grandchild lives.
    let scratch = Scratch::new().map_err(std::io::Error::other)?;
    let said = scratch.path("said");
    let output = std::fs::File::create(&said)?;
    let errors = output.try_clone()?;
    let mut child = command.stdin(Stdio::null()).stdout(output).stderr(errors).spawn()?;
    let Some(status) = wait_within(&mut child, limit)? else { return Ok(None) };
    Ok(Some((status, String::from_utf8_lossy(&std::fs::read(&said)?).into_owned())))
}

/// Waits for the end of a child. Returns `None` if the child exceeded the limit and was killed.
fn wait_within(child: &mut Child, limit: Duration) -> std::io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if start.elapsed() >= limit {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(POLL.min(limit));
    }
}

/// Interval between two checks whether a child has ended.
const POLL: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, limit: Duration) -> (Ended, Vec<String>) {
        let mut lines = Vec::new();
        let mut command = Command::new("sh");
        let ended = follow(command.args(["-c", script]), limit, |line| lines.push(line.to_owned())).unwrap();
        (ended, lines)
    }

    #[test]
    fn lines_come_until_the_end() {
        let (ended, lines) = sh("echo one; echo two; exit 3", Duration::from_secs(20));
        let Ended::Exited(status) = ended else { panic!("{ended:?}") };
        assert_eq!((status.code(), lines), (Some(3), vec!["one".to_owned(), "two".to_owned()]));
    }

    #[test]
    fn the_limit_is_that_of_silence() {
        let (ended, lines) =
            sh("for i in 1 2 3 4; do echo $i; sleep 0.2; done; exec sleep 60", Duration::from_millis(600));
        assert_eq!((ended, lines.len()), (Ended::Silent, 4));
    }

    #[test]
    fn a_child_without_output_has_the_limit_too() {
        let (ended, lines) = sh("echo one; exec >&-; exec sleep 20", Duration::from_millis(600));
        assert_eq!((ended, lines.len()), (Ended::Silent, 1));
        let (ended, _) = sh("exec >&-; sleep 0.1; exit 3", Duration::from_secs(20));
        assert!(matches!(ended, Ended::Exited(status) if status.code() == Some(3)), "{ended:?}");
    }

    #[test]
    fn the_limit_is_that_of_the_whole_run() {
        let run = |script: &str, limit| within(Command::new("sh").args(["-c", script]), limit).unwrap();
        let (status, said) = run("echo one; echo two >&2; exit 3", Duration::from_secs(20)).unwrap();
        assert_eq!((status.code(), said.as_str()), (Some(3), "one\ntwo\n"));
        assert!(run("while true; do echo on; sleep 0.05; done", Duration::from_millis(300)).is_none());
    }
}
