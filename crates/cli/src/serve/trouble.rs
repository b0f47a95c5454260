//! Errors of a request, as pages.

use std::borrow::Cow;

use axum::http::StatusCode;
use axum::response::{Html, IntoResponse, Response};
use ledger::LedgerError;
use report::evolution::failure;

/// Why a page cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    /// No page has this address.
    #[error("There is no page {0}.")]
    Page(String),
    /// The run has no such part of its page.
    #[error("Run {run} has no section '{}'.", ptx::quote::cut(part))]
    Part { run: i64, part: String },
    /// An invalid value in the address.
    #[error("Invalid value '{}' for {argument}.", ptx::quote::cut(value))]
    Argument { argument: &'static str, value: String, accepted: &'static str },
    /// The address has a parameter that its page does not have, or has one twice.
    #[error("Invalid parameter '{}'.", ptx::quote::cut(name))]
    Parameter {
        name: String,
        /// The parameters of the page.
        accepted: &'static [&'static str],
    },
    /// The Host header does not name this server.
    #[error("'{}' is not a name of this server.", ptx::quote::cut(.0))]
    Host(String),
    /// A page of another site made the request.
    #[error("The request came from a page of another site.")]
    Foreign,
    /// A method other than GET or HEAD.
    #[error("These pages can only be read.")]
    Method,
    /// An error of the ledger.
    #[error("{0}.")]
    Ledger(#[from] LedgerError),
    /// An internal error of FlashCore.
    #[error("Internal error: {0}. This is a bug in FlashCore; please report it.")]
    Internal(String),
}

impl Trouble {
    fn status(&self) -> StatusCode {
        match self {
            Trouble::Page(_) | Trouble::Part { .. } | Trouble::Ledger(LedgerError::Unknown { .. }) => {
                StatusCode::NOT_FOUND
            }
            Trouble::Argument { .. } | Trouble::Parameter { .. } => StatusCode::BAD_REQUEST,
            Trouble::Host(_) => StatusCode::MISDIRECTED_REQUEST,
            Trouble::Foreign => StatusCode::FORBIDDEN,
            Trouble::Method => StatusCode::METHOD_NOT_ALLOWED,
            Trouble::Ledger(_) => StatusCode::SERVICE_UNAVAILABLE,
            Trouble::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The requests that the server accepts, for the error page.
    fn accepted(&self) -> Cow<'_, str> {
        let text = match self {
            Trouble::Parameter { accepted: [], .. } => "This page has no parameters.",
            Trouble::Parameter { accepted, .. } => {
                return format!("This page has, each at most once: {}.", accepted.join(", ")).into();
            }
            Trouble::Page(_) => {
                "Pages: /, /run/N, /run/N/candidates, /run/N/candidates.csv, /compare?a=N&b=M, /candidate/N, /diff?a=N&b=M, /topk, /topk?problem=P&device=D, /forecasts, /api/run/N."
            }
            Trouble::Argument { accepted, .. } => accepted,
            Trouble::Host(_) => {
                "It is bound to this machine alone: localhost or 127.0.0.1. `flashcore serve --bind` binds it to another address."
            }
            Trouble::Foreign => "Open the page by its address, or follow a link to a whole page.",
            Trouble::Method => "Expected GET.",
            Trouble::Part { .. } | Trouble::Ledger(_) | Trouble::Internal(_) => "",
        };
        text.into()
    }
}

impl IntoResponse for Trouble {
    fn into_response(self) -> Response {
        let status = self.status();
        (status, Html(failure(&status.to_string(), &self.to_string(), &self.accepted()))).into_response()
    }
}
