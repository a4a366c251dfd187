//! The OpenAPI document: what the attributes of the routes leave out, because it is the same for
//! all of them.

use super::permission::required_role;
use crate::api::ErrorBody;
use crate::daemon::role::Role;
use axum::http::Method;
use utoipa::OpenApi;
use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn, PathItem};
use utoipa::openapi::schema::Type;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{
    Components, Content, HeaderBuilder, ObjectBuilder, OpenApi as Document, Ref, RefOr, Required, Response,
};

/// The parts that belong to no path.
pub(super) fn base() -> Document {
    #[derive(OpenApi)]
    #[openapi(
        info(
            title = "blockmux",
            description = "Control of a running `blockmux serve`. The response to a request that changes something \
                           is sent when the change is done. With `Prefer: respond-async, wait=SECONDS`, the response \
                           is 202 with the URL of an action if the change takes longer. Clients of the control socket \
                           need no credentials."
        ),
        components(schemas(ErrorBody))
    )]
    struct Described;
    Described::openapi()
}

/// Adds tags, roles, credentials, the responses that all operations of a kind have, and the
/// descriptions of responses that have none, to each operation.
pub(super) fn complete(mut document: Document) -> Document {
    let components = document.components.get_or_insert_with(Components::new);
    let mut bearer = Http::new(HttpAuthScheme::Bearer);
    bearer.description = Some("A token of the daemon's config, if it has one".to_owned());
    components.add_security_scheme(TOKEN, SecurityScheme::Http(bearer));
    let description = Some("A client certificate, if the API is served with mutual TLS".to_owned());
    let certificate = SecurityScheme::MutualTls { description, deprecated: None, extensions: None };
    components.add_security_scheme(CERTIFICATE, certificate);
    for (path, item) in &mut document.paths.paths {
        operations(item).for_each(|(method, operation)| complete_operation(&method, path, operation));
    }
    document
}

fn complete_operation(method: &Method, path: &str, operation: &mut Operation) {
    operation.tags = Some(vec![tag(path).to_owned()]);
    let role = required_role(method, path);
    // For these schemes the list has roles (OpenAPI 3.1, Security Requirement Object).
    let requirement =
        |role: Role| [TOKEN, CERTIFICATE].map(|scheme| SecurityRequirement::new(scheme, [role.to_string()]));
    operation.security = Some(role.map_or_else(Vec::new, |role| requirement(role).into()));
    let name = role.map_or_else(|| "none".to_owned(), |role| role.to_string());
    operation.extensions.get_or_insert_default().insert(ROLE.to_owned(), name.into());
    for text in texts_of(path) {
        operation.parameters.get_or_insert_default().push(text);
    }
    let responses = &mut operation.responses.responses;
    let is_query =
        |own: &RefOr<Parameter>| matches!(own, RefOr::T(own) if own.parameter_in == ParameterIn::Query);
    let has_query = operation.parameters.iter().flatten().any(is_query);
    let (has_body, changes) = (operation.request_body.is_some(), *method != Method::GET);
    let errors = [
        (role.is_some(), &["401", "403"][..]),
        (has_query || has_body, &["400"]),
        (path.contains('{'), &["404"]),
        (has_body, &["415"]),
        (changes, &["409", "422", "500", "503"]),
    ];
    for status in errors.iter().filter(|(is_its, _)| *is_its).flat_map(|(_, all)| *all) {
        responses.entry((*status).to_owned()).or_insert_with(|| RefOr::T(error()));
    }
    if changes {
        responses.insert("202".to_owned(), RefOr::T(accepted()));
    }
    let summary = operation.summary.as_deref().unwrap_or_default();
    for (status, response) in responses {
        if let RefOr::T(response) = response
            && response.description.is_empty()
        {
            // What a GET returns is what its summary says.
            let is_result = *method == Method::GET && status == "200";
            response.description = if is_result { summary } else { description(status) }.to_owned();
        }
    }
}

/// The parameters of a path that are texts.
fn texts_of(path: &str) -> impl Iterator<Item = RefOr<Parameter>> {
    let own = TEXTS.iter().filter(|(place, name, _)| path.starts_with(place) && path.contains(name));
    own.map(|(_, name, what)| {
        let text = ObjectBuilder::new().schema_type(Type::String).build();
        let parameter = ParameterBuilder::new().name(name.trim_matches(['{', '}']));
        let parameter = parameter.parameter_in(ParameterIn::Path).required(Required::True);
        parameter.description(Some(*what)).schema(Some(text)).build().into()
    })
}

/// The parameters of paths that are texts, each with the beginning of the paths and its
/// description.
const TEXTS: [(&str, &str, &str); 10] = [
    ("/v1/sessions/", "{session}", "Address of the session, or name of the initiator"),
    ("/v1/secrets/", "{name}", "Name of the secret"),
    ("/v1/volumes/", "{name}", "Name of the volume"),
    ("/v1/volumes/", "{snapshot}", "Name of the snapshot"),
    ("/v1/attachments/", "{volume}", "Name of the volume"),
    ("/v1/targets/", "{target}", "Subsystem NQN, iSCSI name or SRP port"),
    ("/v1/objects/", "{kind}", "Key of a list in the config file, such as `volume`"),
    ("/v1/objects/", "{name}", "Name of the object"),
    ("/v1/objects/", "{part}", "Key of a list within the object"),
    ("/v1/objects/", "{entry}", "Name of the object in that list"),
];

/// The operations of a path.
fn operations(item: &mut PathItem) -> impl Iterator<Item = (Method, &mut Operation)> {
    let PathItem { get, put, post, delete, patch, .. } = item;
    let all = [
        (Method::GET, get),
        (Method::PUT, put),
        (Method::POST, post),
        (Method::DELETE, delete),
        (Method::PATCH, patch),
    ];
    all.into_iter().filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}

/// The group of a path: its kind of objects, or the daemon.
fn tag(path: &str) -> &str {
    let kind = path.strip_prefix("/v1/").and_then(|path| path.split('/').next());
    kind.filter(|kind| !OF_DAEMON.contains(kind)).unwrap_or("daemon")
}

/// A response that reports an error.
fn error() -> Response {
    json("ErrorBody")
}

/// The response for an action that is still running.
fn accepted() -> Response {
    let mut response = json("ActionStatus");
    let text = ObjectBuilder::new().schema_type(Type::String).build();
    let location = HeaderBuilder::new().schema(Some(text)).description(Some("The action's address"));
    response.headers.insert("Location".to_owned(), RefOr::T(location.build()));
    response
}

/// A response whose body has this schema.
fn json(schema: &str) -> Response {
    let mut response = Response::new("");
    let body = Content::new(Some(Ref::from_schema_name(schema)));
    response.content.insert("application/json".to_owned(), RefOr::T(body));
    response
}

/// What a status means if the operation says nothing more special.
fn description(status: &str) -> &'static str {
    match status {
        "200" => "The change is complete",
        "201" => "The object was created",
        "202" => "The change takes longer than the client waits; `Location` has the URL of its action",
        "400" => "The request is not valid HTTP or JSON, or its query is unknown",
        "401" => "The token is missing or wrong",
        "403" => "The client's certificate or role does not permit the request",
        "404" => "There is no such volume, target, unit or action",
        "409" => "The current state of the daemon does not allow the change",
        "412" => "The object has another ETag, or exists although it must be new",
        "415" => "The body is not `application/json`",
        "422" => "A value is invalid; nothing has changed",
        "500" => "The change began and failed",
        "503" => "Too many changes are under way; try again later",
        _ => "",
    }
}

/// The role that an operation requires.
const ROLE: &str = "x-role";
/// The names of the security schemes.
const TOKEN: &str = "token";
const CERTIFICATE: &str = "certificate";
/// The first parts of paths about the daemon as a whole.
const OF_DAEMON: [&str; 4] = ["status", "history", "log", "version"];
