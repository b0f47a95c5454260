//! The connections of the server: their number, their time limits, and which one is closed when there are too
//! many.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

/// Time limit for the header of a request, counted from the start of the connection or from the previous
/// answer.
const HEADER: Duration = Duration::from_secs(10);
/// Maximum number of connections at a time.
const CONNECTIONS: usize = 256;
/// Open files reserved for other uses: those of the runtime, and the ledger files that each blocking thread
/// opens.
const OTHER_FILES: usize = 128;
/// Largest header of a request, bytes.
const BUFFER: usize = 64 << 10;
/// An answer may still be in transit for this long. The connection is not closed for a new one during that
/// time.
const ANSWERED: Duration = Duration::from_secs(1);
/// Pause before the next attempt after the system failed to accept a connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Limits on connections.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum number of connections at a time.
    pub connections: usize,
    /// Time limit for the header of a request.
    pub header: Duration,
}

impl Limits {
    /// The default limits, with fewer connections if the process may open only few files.
    pub fn of_process() -> Limits {
        Limits { connections: connections(open_files()), header: HEADER }
    }
}

/// The number of connections for a limit on open files.
fn connections(files: Option<usize>) -> usize {
    let room = files.map_or(CONNECTIONS, |files| files.saturating_sub(OTHER_FILES).max(files / 4));
    room.clamp(1, CONNECTIONS)
}

#[cfg(unix)]
fn open_files() -> Option<usize> {
    use nix::sys::resource::{Resource, getrlimit};
    let (soft, _) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    usize::try_from(soft).ok()
}

#[cfg(not(unix))]
fn open_files() -> Option<usize> {
    None
}

/// A connection as the accept loop sees it.
struct Connection {
    state: Mutex<State>,
    close: Notify,
}

#[derive(Clone, Copy)]
enum State {
    /// No request has arrived yet.
    New(Instant),
    /// A request is being answered.
    Busy,
    /// The last request has been answered.
    Answered(Instant),
}

impl Connection {
    fn set(&self, state: State) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// The time since which the connection is idle, or `None` while it is in use.
    fn idle_since(&self, now: Instant) -> Option<Instant> {
        match *self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::New(since) => Some(since),
            State::Answered(since) if now.duration_since(since) >= ANSWERED => Some(since),
            State::Busy | State::Answered(_) => None,
        }
    }
}

/// Answers requests until `stop` completes, then gives the requests under way at most `farewell` to end.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    stop: impl Future<Output = ()>,
    farewell: Duration,
) {
    let mut stop = pin!(stop);
    let (stopping, stopped) = watch::channel(false);
    let mut open: BTreeMap<u64, Arc<Connection>> = BTreeMap::new();
    let mut tasks: JoinSet<u64> = JoinSet::new();
    for number in 0.. {
        let accepted = loop {
            tokio::select! {
                () = &mut stop => break None,
                Some(ended) = tasks.join_next() => {
                    // A task that panicked returns no number. Its connection is the one whose `Arc` no task
                    // holds any more.
                    match ended {
                        Ok(number) => drop(open.remove(&number)),
                        Err(_) => open.retain(|_, connection| Arc::strong_count(connection) > 1),
                    }
                }
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => break Some(stream),
                    Err(_) => tokio::time::sleep(PAUSE).await,
                },
            }
        };
        let Some(stream) = accepted else { break };
        if open.len() >= limits.connections && !make_room(&mut open) {
            // All connections are in use, so the new one is closed at once.
            continue;
        }
        let state = Mutex::new(State::New(Instant::now()));
        let connection = Arc::new(Connection { state, close: Notify::new() });
        open.insert(number, Arc::clone(&connection));
        let answered = answer(stream, router.clone(), limits, connection, stopped.clone());
        tasks.spawn(async move {
            answered.await;
            number
        });
    }
    drop(listener);
    // `send` fails if all receivers are gone, which is not an error here.
    let _ = stopping.send(true);
    let _ = tokio::time::timeout(farewell, async { while tasks.join_next().await.is_some() {} }).await;
}

/// Closes the connection that has been idle for the longest time. Returns `false` if none is idle.
fn make_room(open: &mut BTreeMap<u64, Arc<Connection>>) -> bool {
    let now = Instant::now();
    let idle = open.iter().filter_map(|(number, it)| Some((it.idle_since(now)?, *number)));
    let Some((_, number)) = idle.min() else { return false };
    if let Some(connection) = open.remove(&number) {
        connection.close.notify_one();
    }
    true
}

/// Answers the requests of one connection until the client or the server closes it.
async fn answer(
    stream: TcpStream,
    router: Router,
    limits: Limits,
    connection: Arc<Connection>,
    mut stopped: watch::Receiver<bool>,
) {
    let pages = TowerToHyperService::new(router);
    let service = service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        connection.set(State::Busy);
        let answer = pages.call(request);
        let connection = &connection;
        async move {
            let answer = answer.await;
            connection.set(State::Answered(Instant::now()));
            answer
        }
    });
    let mut served = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header)
            .max_buf_size(BUFFER)
            .serve_connection(TokioIo::new(stream), service)
    );
    tokio::select! {
        // An error of one client does not affect the others.
        _ = &mut served => return,
        () = connection.close.notified() => return,
        _ = stopped.wait_for(|stop| *stop) => {}
    }
    served.as_mut().graceful_shutdown();
    let _ = served.await;
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::SocketAddr;

    use axum::routing::get;

    use super::*;

    /// Longer than any answer takes, so that a server that hangs fails the test.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Serves one page while `visit` runs.
    fn while_serving(limits: Limits, visit: impl FnOnce(SocketAddr)) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let router = Router::new().route("/", get(|| async { "a page" }));
        let stop_asked = async {
            let _ = stopped.await;
        };
        let served = runtime.spawn(serve(listener, router, limits, stop_asked, Duration::ZERO));
        visit(address);
        drop(stop);
        runtime.block_on(served).unwrap();
    }

    fn connect(address: SocketAddr, sent: &str) -> std::net::TcpStream {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(sent.as_bytes()).unwrap();
        stream
    }

    /// Reads until the server closes the connection. A reset by the server also counts as the end.
    fn rest(mut stream: std::net::TcpStream) -> String {
        let mut bytes = Vec::new();
        if let Err(error) = stream.read_to_end(&mut bytes) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
        }
        String::from_utf8(bytes).unwrap()
    }

    const HALF: &str = "GET / HTTP/1.1\r\nX: ";
    const WHOLE: &str = "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

    #[test]
    fn half_a_request_holds_no_place() {
        let limits = Limits { connections: 8, header: 10 * PATIENCE };
        while_serving(limits, |address| {
            let halves: Vec<_> = (0..50).map(|_| connect(address, HALF)).collect();
            for _ in 0..20 {
                let answer = rest(connect(address, WHOLE));
                assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("a page"), "{answer}");
            }
            // The oldest connections were closed without an answer.
            for half in halves.into_iter().take(42) {
                assert_eq!(rest(half), "");
            }
        });
    }

    #[test]
    fn a_header_that_does_not_come_ends_the_connection() {
        let limits = Limits { connections: 8, header: Duration::from_millis(50) };
        while_serving(limits, |address| {
            for sent in ["", HALF, &WHOLE.replace("close", "keep-alive")] {
                let answer = rest(connect(address, sent));
                // An idle connection is closed after its answer in the same way.
                assert_eq!(answer.contains("a page"), sent.ends_with("\r\n\r\n"), "{answer}");
            }
        });
    }

    #[test]
    fn few_open_files_mean_few_connections() {
        for (files, expected) in
            [(None, 256), (Some(1 << 20), 256), (Some(256), 128), (Some(64), 16), (Some(0), 1)]
        {
            assert_eq!(connections(files), expected, "{files:?}");
        }
    }
}
