"""Controllers: what runs beside a Kubernetes API server and makes objects follow other objects.

The folder has two halves. The machinery that any controller uses: `api` (the authenticated connection),
`informer` (list and watch into a small cache), `workqueue`, `throttle`, `recorder` (events), `elector`
(one leader), `metrics`, `health`, `manager` (start, lead, stop). And the controllers themselves, of which
there is one: `ephemeral`, which makes the claims of generic ephemeral volumes (E1 to E6).

Nothing here prints, and nothing outside this folder imports the Kubernetes client. Nothing is imported by
this file: `unlade --help` must not pay for a client that it does not use.
"""
