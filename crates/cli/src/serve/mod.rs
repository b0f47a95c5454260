//! The command `flashcore serve`: serves the pages of a ledger to browsers and keeps them up to date.

mod connections;
mod kernels;
mod pages;
mod recent;
mod trouble;

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{MatchedPath, Request, State};
use axum::http::HeaderMap;
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use ledger::Ledger;
use serde_json::json;

use crate::Status;
use crate::args::Serve;
use crate::error::CliError;
use crate::terminal::tell;
use connections::Limits;
use trouble::Trouble;

/// Time that requests under way may take to end after the server was told to stop.
const FAREWELL: Duration = Duration::from_secs(2);

/// Threads that read the ledger. Each holds some files open.
const BLOCKING: usize = 32;

/// State that all requests share.
pub struct Site {
    ledger: PathBuf,
    /// The address that the server listens at. If it is a loopback address, only loopback names are accepted
    /// in Host.
    bind: IpAddr,
    kernels: kernels::Kernels,
    /// Rendered sections of the runs that were requested most recently.
    drawn: pages::Drawn,
}

impl Site {
    /// Runs a query on the ledger, on a thread that may block. Each query opens its own connection, so that
    /// the next query notices a ledger that was moved, replaced or created.
    async fn ask<T: Send + 'static>(
        self: &Arc<Site>,
        question: impl FnOnce(&Site, &Ledger) -> Result<T, Trouble> + Send + 'static,
    ) -> Result<T, Trouble> {
        let site = Arc::clone(self);
        let asked = tokio::task::spawn_blocking(move || {
            let ledger = Ledger::read(&site.ledger)?;
            question(&site, &ledger)
        });
        asked.await.map_err(|error| Trouble::Internal(error.to_string()))?
    }
}

pub fn serve(args: &Serve) -> Result<Status, CliError> {
    let listener = listen(args.bind, args.port)?;
    let address = listener.local_addr().map_err(CliError::Serve)?;
    if let Err(error) = Ledger::read(&args.ledger.path) {
        tell(format_args!("{error}; the pages show this message until the ledger can be read"));
    }
    let site = Arc::new(Site {
        ledger: args.ledger.path.clone(),
        bind: args.bind,
        kernels: kernels::Kernels::default(),
        drawn: pages::Drawn::default(),
    });
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).max_blocking_threads(BLOCKING).enable_all().build();
    let runtime = runtime.map_err(CliError::Serve)?;
    // The handler is set before the address is printed, because whoever reads the address may stop the server
    // at once.
    let interrupted = {
        let _context = runtime.enter();
        interruption().map_err(CliError::Serve)?
    };
    let mut out = crate::terminal::out();
    crate::unless_closed(
        if args.json {
            out.json("serve", &json!({ "url": format!("http://{address}/"), "ledger": args.ledger.path }))
        } else {
            writeln!(out, "http://{address}/")
        }
        .and_then(|()| out.flush())
        .map_err(CliError::from),
    )?;
    drop(out);
    tell(format_args!("serving {}; Ctrl-C ends it", args.ledger.path.display()));
    let served = runtime.block_on(async {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        connections::serve(listener, router(site), Limits::of_process(), interrupted, FAREWELL).await;
        Ok(())
    });
    // An analysis that is still running is not waited for.
    runtime.shutdown_timeout(Duration::from_millis(200));
    served.map_err(CliError::Serve)?;
    Ok(Status::Passed)
}

/// Binds the address. If the port is taken, the error names a free one.
fn listen(bind: IpAddr, port: u16) -> Result<TcpListener, CliError> {
    let refuse =
        |accepted: String| CliError::Argument { argument: "--port", value: port.to_string(), accepted };
    TcpListener::bind(SocketAddr::new(bind, port)).map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            let free = TcpListener::bind(SocketAddr::new(bind, 0)).and_then(|l| l.local_addr());
            let free = free
                .map_or_else(|_| "another port".to_owned(), |a| format!("a free port, such as {}", a.port()));
            refuse(format!("{free}; another program listens at {bind}:{port}"))
        }
        std::io::ErrorKind::PermissionDenied => refuse(format!("1024 or above ({error})")),
        std::io::ErrorKind::AddrNotAvailable => CliError::Argument {
            argument: "--bind",
            value: bind.to_string(),
            accepted: "an address of this machine, such as 127.0.0.1 or 0.0.0.0".to_owned(),
        },
        _ => CliError::Serve(error),
    })
}

/// Completes on Ctrl-C or another signal that asks a program to end. The handlers are set by the call itself,
/// so a signal before the first poll counts too. Must be called within a runtime.
#[cfg(unix)]
fn interruption() -> std::io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let [mut interrupt, mut terminate] = [signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?];
    Ok(async move {
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
    })
}

/// Completes on Ctrl-C.
#[cfg(not(unix))]
fn interruption() -> std::io::Result<impl Future<Output = ()>> {
    Ok(async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    })
}

fn router(site: Arc<Site>) -> Router {
    Router::new()
        .route("/", get(pages::runs))
        .route("/live.js", get(pages::script))
        .route("/run/{run}", get(pages::run))
        .route("/run/{run}/part/{part}", get(pages::part))
        .route("/run/{run}/candidates", get(pages::candidates))
        .route("/run/{run}/candidates.csv", get(pages::csv))
        .route("/compare", get(pages::compare))
        .route("/api/run/{run}", get(pages::news))
        .route("/candidate/{candidate}", get(pages::candidate))
        .route("/candidate/{candidate}/kernel", get(pages::kernel))
        .route("/diff", get(pages::pair))
        .route("/diff/part", get(pages::difference))
        .route("/topk", get(pages::top))
        .route("/forecasts", get(pages::forecasts))
        .fallback(pages::nothing)
        .method_not_allowed_fallback(pages::reads_only)
        .layer(middleware::from_fn_with_state(Arc::clone(&site), guard))
        .with_state(site)
}

/// The content security policy: pages may show themselves and query this server, nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; \
     img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Rejects requests with a foreign Host header and requests made by pages of other sites, and sets the
/// headers of every answer.
async fn guard(State(site): State<Arc<Site>>, request: Request, next: Next) -> Response {
    let mut response = match refusal(&request, site.bind) {
        Some(trouble) => trouble.into_response(),
        None => next.run(request).await,
    };
    let headers: [(HeaderName, &'static str); 4] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Why a request is refused, whatever page it asks for.
fn refusal(request: &Request, bind: IpAddr) -> Option<Trouble> {
    // The name of a foreign page may resolve to this address (DNS rebinding). That page could then read the
    // ledger.
    let hosts = request.headers().get_all(header::HOST).iter();
    let mut hosts = hosts.map(|host| String::from_utf8_lossy(host.as_bytes()).into_owned());
    if let Some(host) = hosts.find(|host| !ours(host, bind)) {
        return Some(Trouble::Host(host));
    }
    if foreign(request.headers(), request.uri().path()) {
        return Some(Trouble::Foreign);
    }
    let route = request.extensions().get::<MatchedPath>()?;
    pages::unknown_parameter(route.as_str(), request.uri())
}

/// Whether a page of another site made the request, as the `Sec-Fetch` headers of browsers say. A link on
/// another site may open a page here, but may not load a part of a page: such a part can start the analysis
/// of a kernel.
fn foreign(headers: &HeaderMap, path: &str) -> bool {
    let told = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    match told("sec-fetch-site") {
        None | Some("same-origin" | "none") => false,
        Some(_) => {
            let follows_a_link =
                told("sec-fetch-mode") == Some("navigate") && told("sec-fetch-dest") == Some("document");
            let part = ["/part", "/kernel", "/api", "/live.js"].iter().any(|name| path.contains(name));
            !follows_a_link || part
        }
    }
}

/// Whether a Host header names this server. If the server is bound to a public address, any name is accepted.
fn ours(host: &str, bind: IpAddr) -> bool {
    if !bind.is_loopback() {
        return true;
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name == "localhost" || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_names_reach_a_loopback_server() {
        let local: IpAddr = [127, 0, 0, 1].into();
        for host in ["localhost", "localhost:8765", "127.0.0.1:1", "[::1]:8765", "127.0.0.1"] {
            assert!(ours(host, local), "{host}");
        }
        for host in ["evil.example", "evil.example:8765", "localhost.evil.example", "10.0.0.1:80", ""] {
            assert!(!ours(host, local), "{host}");
        }
        assert!(ours("gpu-7:8765", [0, 0, 0, 0].into()));
    }

    #[test]
    fn pages_of_other_sites_begin_no_work() {
        let told = |site: &'static str, mode: &'static str, dest: &'static str| {
            let pairs = [("sec-fetch-site", site), ("sec-fetch-mode", mode), ("sec-fetch-dest", dest)];
            let named =
                pairs.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
            HeaderMap::from_iter(named)
        };
        let link = |site| told(site, "navigate", "document");
        for path in ["/", "/candidate/1/kernel", "/diff/part"] {
            assert!(!foreign(&HeaderMap::new(), path), "{path} by a program");
            assert!(!foreign(&link("none"), path), "{path} by hand");
            assert!(!foreign(&told("same-origin", "cors", "empty"), path), "{path} by a page of ours");
            for site in ["cross-site", "same-site"] {
                assert!(foreign(&told(site, "no-cors", "image"), path), "{path} as an image");
                assert!(foreign(&told(site, "navigate", "iframe"), path), "{path} in a frame");
                assert_eq!(foreign(&link(site), path), path != "/", "{path} by a link");
            }
        }
    }

    #[test]
    fn a_taken_port_names_a_free_one() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let message = listen([127, 0, 0, 1].into(), port).unwrap_err().to_string();
        let named = message.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<u16>().ok());
        assert!(message.contains("--port") && message.contains("a free port"), "{message}");
        assert!(named.into_iter().any(|n| n > 1024 && n != port), "{message}");
        assert!(listen([192, 0, 2, 1].into(), 0).unwrap_err().to_string().contains("--bind"));
    }
}
