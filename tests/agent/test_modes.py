"""Agents outside the process of the trainer: an external HTTP client."""

import asyncio
import http.client

import httpx


def admin_of(workflow) -> dict[str, str]:
    return {"authorization": f"Bearer {workflow.key_file.read_text()}"}


def test_an_external_client_runs_the_waiting_episodes(make_workflow, scripted_engine):
    workflow = make_workflow(None, mode="online")
    url = workflow.server.base_url

    async def outside(client):
        started = await client.post(f"{url}/rl/start_session", headers=admin_of(workflow))
        while started.status_code == 429:
            await asyncio.sleep(0.005)
            started = await client.post(f"{url}/rl/start_session", headers=admin_of(workflow))
        session = started.json()
        key = {"authorization": f"Bearer {session['api_key']}"}
        body = {"messages": [{"role": "user", "content": session["data"]["ask"]}]}
        await client.post(f"{url}/v1/chat/completions", headers=key, json=body)
        await client.post(f"{url}/rl/set_reward", headers=key, json={"reward": 0.25})
        exported = await client.post(
            f"{url}/export_trajectories",
            headers=admin_of(workflow),
            json={"session_id": session["session_id"]},
        )
        await client.post(f"{url}/rl/end_session", headers=key)
        return started, exported.json()

    async def both():
        async with httpx.AsyncClient() as client:
            return await asyncio.gather(
                workflow.arun_episode(scripted_engine("a"), {"ask": "?"}), outside(client)
            )

    rows, (_, exported) = asyncio.run(both())
    assert rows["rewards"].tolist() == [0.25]
    (interaction,) = exported["interactions"]
    assert interaction["input_tokens"] + interaction["output_tokens"] == rows["input_ids"][0].tolist()
    assert (interaction["reward"], interaction["message"]["content"]) == (0.25, "a")
    idle = httpx.post(f"{url}/rl/start_session", headers=admin_of(workflow))
    assert (idle.status_code, idle.json()["error"]["code"]) == (429, "no_capacity")


def test_a_reward_that_is_no_finite_number_is_refused_over_http(make_workflow, scripted_engine):
    workflow = make_workflow(None, mode="online")

    async def offer_and_set():
        episode = asyncio.ensure_future(workflow.arun_episode(scripted_engine(), {}))
        while not workflow.server.proxy.offers:
            await asyncio.sleep(0)
        session, _ = workflow.server.proxy.offers[0]
        async with httpx.AsyncClient(headers={"x-api-key": session.key}) as client:
            url = f"{workflow.server.base_url}/rl/set_reward"
            replies = [
                await client.post(url, content=body) for body in ('{"reward": NaN}', '{"reward": "1"}', "[]")
            ]
        episode.cancel()
        await asyncio.gather(episode, return_exceptions=True)
        assert list(workflow.server.proxy.offers) == []
        return [reply.json()["error"]["message"] for reply in replies]

    assert asyncio.run(offer_and_set()) == [
        "reward is nan; expected a finite number",
        "reward is '1'; expected a number",
        "the body is []; expected a JSON object",
    ]


def test_the_proxy_refuses_requests_that_a_web_page_could_send(make_workflow):
    workflow = make_workflow(None, mode="online")
    url, admin = workflow.server.base_url, admin_of(workflow)

    def status(method: str, path: str, **headers: str) -> int:
        content = b"{}" if method == "POST" else None
        return httpx.request(method, url + path, headers=admin | headers, content=content).status_code

    assert status("POST", "/rl/start_session") == 429
    assert status("POST", "/rl/start_session", host="evil.example") == 403
    assert status("POST", "/rl/start_session", origin="http://evil.example") == 403
    assert status("POST", "/rl/start_session", **{"content-type": "text/plain"}) == 415
    assert status("POST", "/export_trajectories", host="evil.example", origin="http://evil.example") == 403
    assert status("GET", "/rl/start_session") == 405
    assert status("GET", "/v1/chat/completions") == 405
    assert status("GET", "/health", host=f"[::1]:{workflow.server.port}") == 200


def test_a_key_or_path_that_is_no_utf8_is_the_clients_fault(make_workflow):
    workflow = make_workflow(None, mode="online")
    connection = http.client.HTTPConnection("127.0.0.1", workflow.server.port, timeout=20)
    statuses = []
    for method, path in (
        ("POST", "/rl/start_session"),
        ("POST", "/rl/set_reward"),
        ("GET", "/v1/models/%FF"),
    ):
        connection.request(method, path, headers={"authorization": b"Bearer \xff\xfe"})
        reply = connection.getresponse()
        reply.read()
        statuses.append(reply.status)
    connection.close()
    assert statuses == [401, 401, 401]
